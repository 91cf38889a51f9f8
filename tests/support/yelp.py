"""Small files in the format of the Yelp open dataset, for tests."""

import json

NAMES = tuple(f"yelp_academic_dataset_{name}.json" for name in ("business", "user", "review"))
BUSINESSES = [
    {
        "business_id": "b1",
        "name": 'Café "Eins"',
        "city": "Reno",
        "state": "NV",
        "stars": 4.5,
        "review_count": 5,
        "is_open": 1,
        "attributes": {"WiFi": "u'free'"},
        "categories": "Restaurants, Coffee & Tea, Restaurants",
        "hours": {"Monday": "7:0-15:0"},
    },
    {"business_id": "b2", "city": "", "state": "NV", "stars": 1.5, "attributes": None, "categories": None},
]
USERS = [
    {
        "user_id": "u1",
        "name": "Zoë",
        "review_count": 9,
        "yelping_since": "2010-01-01 00:00:00",
        "elite": "",
        "friends": "u2, u3",
        "fans": 3,
        "average_stars": 4.2,
    },
    {"user_id": "u2", "yelping_since": "2018-07-08"},
]


def review(user, business, stars, date, **more):
    return {
        "review_id": "r",
        "user_id": user,
        "business_id": business,
        "stars": stars,
        "useful": 1,
        "funny": 0,
        "cool": 0,
        "text": 'Tea & "cake"\nagain \U0001f370',
        "date": date,
        **more,
    }


REVIEWS = [  # not in the order of time
    review("u1", "b1", 5.0, "2018-07-10 12:00:00"),
    review("u1", "b2", 1, "2018-07-07 00:00:00"),
    review("u2", "b1", 4.0, "2018-07-09 00:00:00"),
    review("u3", "b9", 5.0, "2018-07-10 12:00:00"),  # neither is known
    review("u2", "b1", 5.0, "2018-07-11 00:00:00"),
]


def lines(objects):
    return "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in objects)


def write(folder, reviews=REVIEWS, businesses=BUSINESSES, users=USERS):
    folder.mkdir(exist_ok=True)
    for name, objects in zip(NAMES, (businesses, users, reviews), strict=True):
        (folder / name).write_text(objects if isinstance(objects, str) else lines(objects))
    return folder


def many(folder):
    reviews = [review(f"u{i % 7}", f"b{i % 3}", 1 + i % 5, f"2018-{1 + i // 28:02}-{1 + i % 28:02}") for i in range(80)]
    return write(folder, reviews)
