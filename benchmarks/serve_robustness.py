"""Does a server lose, leak or swell under requests that are wrong, too large, too many, and broken off?

    python benchmarks/serve_robustness.py EXPORT_OR_RUN [--minutes 10] [--malformed 1000] [--oversized 100]

Starts `recjax serve` with a short queue. Sends the malformed and the oversized requests, clients that leave in the
middle, and bursts beyond the queue, good requests between them all, until the time is up; then SIGTERM under load.
Prints counts and the growth of memory and open files after the first fifth. Ends with status 1 if a request that the
server took is not answered, a good request is answered otherwise than before or by other than 200 or 503, a bad one by
other than 400 (413 if too large) or 503, if memory grew by over 32 MiB or files by over 8, or if the server says other
counts.
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


async def send(port, body, leave=False):
    """The status and text of the answer; status 0 if the connection broke, None if we left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /score HTTP/1.1\r\nHost: here\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + (body[: len(body) // 2] if leave else body))
        if leave:
            return None, b""
        answer = await reader.read()
        status, _, rest = answer.partition(b"\r\n\r\n")
        return int(status.split()[1]) if status else 0, rest
    except ConnectionError:
        return 0, b""
    finally:
        writer.close()


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


async def under_load(port, process, example, counts):
    """SIGTERM while twenty clients ask."""
    good = json.dumps(example).encode()

    async def client():
        while True:
            try:
                status, _ = await send(port, good)
            except ConnectionError:
                return
            counts["good", status] += 1

    clients = [asyncio.create_task(client()) for _ in range(20)]
    await asyncio.sleep(1)
    process.send_signal(signal.SIGTERM)
    await asyncio.wait(clients, timeout=60)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--malformed", type=int, default=1000)
    parser.add_argument("--oversized", type=int, default=100)
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
        asyncio.run(under_load(port, process, example, counts))
        _, err = process.communicate(timeout=60)
    said = int(re.search(r"stopped by SIGTERM: ([0-9,]+) requests", err)[1].replace(",", ""))
    answered = sum(count for (_, status), count in counts.items() if status)
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
    if wrong or lost or growth[0] > GROWTH_MIB or growth[1] > GROWTH_FILES or process.returncode != 143:
        print(f"failed: {len(wrong)} wrong, lost {lost}, growth {growth}, status {process.returncode}\n{err[-2000:]}")
        sys.exit(1)


if __name__ == "__main__":
    main()
