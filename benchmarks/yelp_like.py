"""Writes files in the format of the Yelp open dataset with the proportions of the real one, none of its rows.

    python benchmarks/yelp_like.py FOLDER [--reviews 200000] [--text 700] [--seed 0]

0.28 users and 0.021 businesses for each review, few of which have most; texts of 700 bytes as in the real one (5.3 GB
for 7 million reviews); users have long lists of friends. Whether a review has 5 stars follows from a planted model:
effects of user, business, city and of one of the categories of the business, and a product of one of the user and one
of the business. Stars of a business and mean stars of a user are those of their reviews; so what a model can learn of
businesses is mostly by their category. The best AUC that any model can expect on all reviews is printed.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from recjax.data.synthetic.clicks import expected_auc

_CATEGORIES = 77  # of which each has an effect


def write(folder: Path, reviews: int, text_bytes: int = 700, seed: int = 0) -> np.ndarray:
    """Writes the three files; gives P(5 stars) of each review."""
    rng = np.random.default_rng(seed)
    users, businesses, cities = max(1, int(0.28 * reviews)), max(1, int(0.021 * reviews)), 900

    def key(kind: str, number: int) -> str:
        return f"{kind}{number:021d}"

    who = (users * rng.random(reviews) ** 3).astype(int)
    where = (businesses * rng.random(reviews) ** 2).astype(int)
    of_user, of_business = rng.standard_normal((2, users)), rng.standard_normal((2, businesses))
    of_category = rng.standard_normal(_CATEGORIES)
    logit = (
        0.9 * of_category[where % _CATEGORIES]
        + 0.8 * of_user[0, who]
        + 0.9 * of_business[0, where]
        + 0.3 * rng.standard_normal(cities)[where % cities]
    )
    probability = 1 / (1 + np.exp(0.2 - logit - 0.5 * of_user[1, who] * of_business[1, where]))
    stars = np.where(rng.random(reviews) < probability, 5, rng.integers(1, 5, reviews)).tolist()
    given = np.array(stars, float)

    def mean_by(keys: np.ndarray, count: int) -> list[float]:
        sums = np.bincount(keys, given, count) / np.maximum(1, np.bincount(keys, minlength=count))
        return np.where(sums > 0, sums, 3.0).tolist()

    of_shops, of_writers = np.round(2 * np.array(mean_by(where, businesses))) / 2, mean_by(who, users)
    with (folder / "yelp_academic_dataset_business.json").open("w") as file:
        for i in range(businesses):
            row = {
                "business_id": key("b", i),
                "name": f"Shop {i}",
                "address": "1 Road",
                "city": f"City {i % cities}",
                "state": f"S{i % 27}",
                "stars": float(of_shops[i]),
                "review_count": 9,
                "is_open": 1,
                "attributes": {"WiFi": "no"},
                "categories": f"Restaurants, Kind {i % 1300}, Other {i % _CATEGORIES}",
                "hours": None,
            }
            file.write(json.dumps(row) + "\n")
    friends = ", ".join(key("u", i) for i in range(60))
    with (folder / "yelp_academic_dataset_user.json").open("w") as file:
        for i in range(users):
            row = {
                "user_id": key("u", i),
                "name": "A",
                "review_count": 3,
                "yelping_since": "2010-03-04 05:06:07",
                "friends": friends,
                "fans": 0,
                "average_stars": round(of_writers[i], 2),
            }
            file.write(json.dumps(row) + "\n")
    times = np.datetime64("2008-01-01T00:00:00") + rng.integers(0, 4 * 10**8, reviews)
    days = [str(time).replace("T", " ") for time in times]
    text = ('The tea was "fine",\nthe rest not so. ' * (text_bytes // 38 + 1))[:text_bytes]
    with (folder / "yelp_academic_dataset_review.json").open("w") as file:
        for i in range(reviews):
            row = {
                "review_id": key("r", i),
                "user_id": key("u", who[i]),
                "business_id": key("b", where[i]),
                "stars": float(stars[i]),
                "useful": 0,
                "funny": 0,
                "cool": 0,
                "text": text,
                "date": days[i],
            }
            file.write(json.dumps(row) + "\n")
    return np.asarray(probability)


def main() -> None:
    """Writes and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reviews", type=int, default=200_000)
    parser.add_argument("--text", type=int, default=700, help="bytes of a review (default: 700)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    best = expected_auc(write(options.folder, options.reviews, options.text, options.seed))
    print(f"{options.reviews:,} reviews in {options.folder}; best AUC {best:.4f}")


if __name__ == "__main__":
    main()
