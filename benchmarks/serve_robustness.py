"""Does a server lose, leak or swell under requests that are wrong, too large, too many, slow, and broken off?

    python benchmarks/serve_robustness.py EXPORT_OR_RUN [--minutes 10] [--malformed 1000] [--oversized 100]
        [--clients 64] [--seconds 180]

Starts `recjax serve` with a short queue. Sends the malformed and the oversized requests, clients that leave in the
middle, and bursts beyond the queue, good requests between them all, until the time is up. Then, each with good requests
beside it: 300 clients with half a head, 140 with a head and one byte, 24 that send 4 MiB at once (an empty object
1.4 million times, and 300,000 keys of which one stands twice). Last, so many clients ask for so many seconds, and
SIGTERM comes while they do.

Prints counts and the growth of memory and open files after the first fifth. Ends with status 1 if a request that the
server took is not answered, a good request is answered otherwise than before or by other than 200 or 503, a bad one by
other than 400 (413 if too large) or 503; if a slow client is not sent away in 15 s, or keeps a good request out; if
memory grew by over 32 MiB or files by over 8, or memory was ever over 1 GiB more than at the start; if the server does
not end within 30 s of SIGTERM, or says other counts.
"""

import argparse
import asyncio
import collections
import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

QUEUE, GROWTH_MIB, GROWTH_FILES = 8, 32, 8
SENT_AWAY_S, PEAK_MIB, END_S = 15, 1024, 30
PATIENCE_S = 60  # for any answer: longer is a hang


async def send(port, body, leave=False):
    """The status and text of the answer; status 0 if the connection broke, None if we left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head(body) + (body[: len(body) // 2] if leave else body))
        if leave:
            return None, b""
        async with asyncio.timeout(PATIENCE_S):
            return split(await reader.read())
    except ConnectionError:
        return 0, b""
    finally:
        writer.close()


def head(body):
    """What stands before a body."""
    return f"POST /score HTTP/1.1\r\nHost: here\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()


def split(answer):
    """Status and text of an answer; 0 if there is none."""
    status, _, rest = answer.partition(b"\r\n\r\n")
    return int(status.split()[1]) if status else 0, rest


def spoiled(rng, body):
    """A text that is no request, made of one that is."""
    kind = rng.randrange(6)
    text = bytearray(body)
    if kind == 0:
        return bytes(text[: rng.randrange(len(text))])
    if kind == 1:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(2000)))
    if kind == 2:
        return body.replace(b'"candidates"', b'"candidate"')
    if kind == 3:
        request = json.loads(body)
        request["candidates"][0] = rng.choice([None, 3, [], {}, "x"])
        return json.dumps(request).encode()
    if kind == 4:
        return b"[" * rng.randrange(100_000)
    request = json.loads(body)
    row = rng.choice(request["candidates"])
    row[rng.choice(sorted(row))] = rng.choice([{}, {"a": 1}, [[[]]]])
    return json.dumps(request).encode()


def alike(text, truth):
    """True if scores are the same up to rounding, which depends on how many others were scored together.

    A logit is a sum of products that cancel: near 0 its error is that of the largest of them, not 1e-5 of what is left.
    4e-6 of a logit are at most 1e-6 of a probability.
    """
    found, wanted = (json.loads(each)["scores"] for each in (text, truth))
    for column, numbers in wanted.items():
        slack = {"probability": (1e-6, 0)}.get(column, (4e-6, 1e-5))
        if not all(abs(x - y) <= slack[0] + slack[1] * abs(y) for x, y in zip(found[column], numbers, strict=True)):
            return False
    return found.keys() == wanted.keys()


def resident(pid):
    """Resident memory in MiB, and the number of open files."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20, len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def attack(port, pid, example, options, counts):
    """Sends it all; gives (seconds, MiB, files) over time."""
    rng, good = random.Random(options.seed), json.dumps(example).encode()
    _, truth = await send(port, good)
    counts["good", 200] += 1
    left = {"malformed": options.malformed, "oversized": options.oversized}
    began, seen, wrong = time.monotonic(), [], []

    async def one(kind):
        leave = kind == "left"
        body = {"malformed": spoiled(rng, good), "oversized": b" " * rng.randrange(4_200_000, 9_000_000)}.get(
            kind, good
        )
        status, text = await send(port, body, leave)
        counts[kind, status] += 1
        fits = {"good": status in (200, 503), "malformed": status in (400, 503), "oversized": status in (413, 503)}
        if not fits.get(kind, True) or (status == 200 and not alike(text, truth)):
            wrong.append((kind, status, body[:200], text[:200]))

    while time.monotonic() - began < options.minutes * 60 or any(left.values()):
        kinds = ["good"] * rng.choice([1, 1, 1, 4, 40]) + ["left"] * (rng.random() < 0.1)
        for kind, chance in (("malformed", 0.7), ("oversized", 0.07)):
            if left[kind] and rng.random() < chance:
                kinds.append(kind)
        await asyncio.gather(*(one(kind) for kind in kinds))
        for kind in left:
            left[kind] -= kind in kinds
        seen.append((time.monotonic() - began, *resident(pid)))
        await asyncio.sleep(0.02)
    return seen, wrong


async def slow(port, example, counts):
    """Clients that stop in the middle, by their hundreds, and good requests meanwhile; gives what was wrong."""
    good, wrong = json.dumps(example).encode(), []
    whole = head(good)
    for kind, clients, sent in (("half heads", 300, whole[:30]), ("slow bodies", 140, whole + good[:1])):
        began, left = time.monotonic(), set()

        async def one(sent=sent, left=left, began=began):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            async with asyncio.timeout(PATIENCE_S):
                status, _ = split(await reader.read())
            writer.close()
            left.add((status, time.monotonic() - began))
            counts["slow", status] += 1

        stopped = [asyncio.create_task(one()) for _ in range(clients)]
        await asyncio.sleep(1)
        statuses = []
        while time.monotonic() - began < 8:
            statuses.append((await send(port, good))[0])
            counts["good", statuses[-1]] += 1
        await asyncio.gather(*stopped)
        longest = max(seconds for _, seconds in left)
        print(f"{clients} {kind}: sent away after {longest:.1f} s at most; {len(statuses):,} good requests meanwhile")
        if set(statuses) != {200} or {status for status, _ in left} != {408} or longest > SENT_AWAY_S:
            wrong.append((kind, collections.Counter(statuses), left))
    return wrong


async def large(port, pid, example, counts):
    """Two dozen of the largest requests at once, of two kinds; gives what was wrong, and the most MiB meanwhile."""
    keys = ",".join(f'"k{number}":1' for number in [*range(290_000), 289_999]).encode()
    kinds = [b'{"candidates":[' + b"{}," * 1_398_000 + b"{}]}", b'{"candidates":[{' + keys + b"}]}"]
    good, wrong, most, began = json.dumps(example).encode(), [], 0.0, time.monotonic()
    sent = [asyncio.create_task(send(port, kinds[at % 2])) for at in range(24)]
    slowest = 0.0
    while not all(task.done() for task in sent):
        asked = time.monotonic()
        status, _ = await send(port, good)
        slowest = max(slowest, time.monotonic() - asked)
        counts["good", status] += 1
        most = max(most, resident(pid)[0])
        if status not in (200, 503):
            wrong.append(("good among large ones", status))
        await asyncio.sleep(0.02)
    statuses = collections.Counter(task.result()[0] for task in sent)
    for status, count in statuses.items():
        counts["large", status] += count
    print(
        f"24 of 4 MiB at once: {dict(statuses)} in {time.monotonic() - began:.1f} s; the slowest good request "
        f"meanwhile took {slowest:.1f} s; memory at most {most:.0f} MiB"
    )
    return wrong + ([("large", statuses)] if set(statuses) - {400, 503} else []), most


async def under_load(port, process, example, options, counts):
    """Many clients ask for a while, and then SIGTERM; gives what was wrong, and the seconds until the process ended."""
    good = json.dumps(example).encode()
    _, truth = await send(port, good)
    counts["good", 200] += 1
    wrong, times = [], []

    async def client():
        while True:
            asked = time.monotonic()
            try:
                status, text = await send(port, good)
            except ConnectionError:
                return
            times.append(time.monotonic() - asked)
            counts["good", status] += 1
            if status not in (0, 200, 503) or (status == 200 and not alike(text, truth)):
                wrong.append(("good under load", status, text[:200]))

    clients = [asyncio.create_task(client()) for _ in range(options.clients)]
    await asyncio.sleep(options.seconds)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    while process.poll() is None and time.monotonic() - began < END_S + 15:
        await asyncio.sleep(0.05)
    took = time.monotonic() - began
    _, hung = await asyncio.wait(clients, timeout=10)
    print(
        f"{options.clients} clients for {options.seconds:.0f} s: {len(times):,} answers, the slowest after "
        f"{max(times):.1f} s; the server ended {took:.1f} s after SIGTERM"
    )
    if hung or took > END_S:
        wrong.append(("end", len(hung), took))
    return wrong


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--malformed", type=int, default=1000)
    parser.add_argument("--oversized", type=int, default=100)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    command = [sys.executable, "-m", "recjax", "serve", options.folder, "--port", "0", "--json"]
    command += ["--queue", str(QUEUE)]
    counts = collections.Counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        described = json.loads(process.stdout.readline())
        port = int(described["url"].rpartition(":")[2])
        example = described["example"]
        seen, wrong = asyncio.run(attack(port, process.pid, example, options, counts))
        before, _ = resident(process.pid)
        wrong += asyncio.run(slow(port, example, counts))
        more, most = asyncio.run(large(port, process.pid, example, counts))
        wrong += more
        wrong += asyncio.run(under_load(port, process, example, options, counts))
        process.kill()
        _, err = process.communicate(timeout=60)
    said = re.search(r"stopped by SIGTERM: ([0-9,]+) requests", err)
    said = int(said[1].replace(",", "")) if said else -1
    answered = sum(count for (kind, status), count in counts.items() if status and kind != "slow")
    answered += 140 if ("slow", 408) in counts else 0  # half heads are no requests
    broken = sum(count for (_, status), count in counts.items() if status == 0)
    gone = sum(count for (kind, _), count in counts.items() if kind == "left")
    fifth = seen[len(seen) // 5]
    growth = seen[-1][1] - fifth[1], seen[-1][2] - fifth[2]
    for (kind, status), count in sorted(counts.items(), key=str):
        print(f"{kind:10} {status}: {count:,}")
    print(
        f"{seen[-1][0]:.0f} s; memory {fifth[1]:.0f} MiB after a fifth, {seen[-1][1]:.0f} at the end; open files "
        f"{fifth[2]} and {seen[-1][2]}"
    )
    print(
        f"the server says that it answered {said:,}; clients got {answered:,}, {gone} had left, {broken} were cut off"
    )
    for each in wrong[:10]:
        print("wrong:", each)
    # The answer to a client that has left may or may not have been counted.
    lost = not answered <= said <= answered + gone
    swollen = growth[0] > GROWTH_MIB or growth[1] > GROWTH_FILES or most - before > PEAK_MIB
    if wrong or lost or swollen or process.returncode != 143:
        print(f"failed: {len(wrong)} wrong, lost {lost}, growth {growth}, status {process.returncode}\n{err[-2000:]}")
        sys.exit(1)


if __name__ == "__main__":
    main()
