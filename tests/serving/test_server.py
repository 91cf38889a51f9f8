"""`recjax serve`: scores are those of the export, however requests come together; and nothing is lost."""

import asyncio
import dataclasses
import gc
import http.client
import json
import re
import signal
import socket
import threading
import time

import numpy as np
import pytest
from support import tables
from support.commands import SMALL, assert_refused, inside, start
from support.serving import ask, export_shop, running
from support.shop import rows

import recjax
from recjax.data.prepare.encoder import open_encoder
from recjax.errors import ConfigError
from recjax.serving import loader, server
from recjax.serving.example_rows import Examples
from recjax.serving.export import write
from recjax.serving.faults import RowFaults
from recjax.serving.rows import json_lines_of_table
from recjax.serving.service import Service, ServiceConfig
from recjax.train.build import build_trainer

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")
pytest.importorskip("flatbuffers", reason="the extra `serve` is not installed")
# Full, as all that needs an extra.
pytestmark = [pytest.mark.full, pytest.mark.light_compile, pytest.mark.few_programs, pytest.mark.shared_programs]

CONFIG = ServiceConfig(most_candidates=8, queue=4, most_bytes=20_000, read_s=0.2)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export_shop(tmp_path_factory.mktemp("shop"), user=["user", "tags"])


def request_of(which, shared=()):
    made = [rows()[at] for at in which]
    user = {name: made[0][name] for name in shared}
    candidates = [{name: value for name, value in row.items() if name not in shared} for row in made]
    return json.dumps({"user": user, "candidates": candidates}).encode()


def run(exported, config, act):
    """Has `act(service, ask of its application)` done in a loop of its own."""

    async def main():
        service = Service(exported, config)
        async with running(service) as app:
            assert gc.get_freeze_count() > 10_000, "no pass of the collector over all there is while clients wait"
            return await act(service, lambda *of, **more: ask(app, *of, **more))

    return asyncio.run(main())


def truth(exported, reader, body):
    """Logits by the loader, one candidate after the other."""
    model = loader.load(exported)
    given = reader.read(body)
    assert given.users == given.size
    ids, lengths = {}, {}
    for name, bags in given.bags.items():
        ids[name] = bags.ids
        if bags.lengths is not None:
            lengths[name] = bags.lengths
    return model(ids, lengths, {}, given.dense)


def test_requests_that_come_together_get_their_own_scores(exported):
    bodies = [request_of(range(at, at + n)) for at, n in ((0, 1), (9, 5), (20, 8), (40, 3))]
    bodies.append(request_of(range(60, 65), ["user", "tags"]))

    async def act(service, ask):
        found = await asyncio.gather(*(ask("/score", body) for body in bodies[:3]))
        found += await asyncio.gather(*(ask("/score", body) for body in bodies[3:]))
        return service, found, (await ask("/metrics"))[2]

    service, found, metrics = run(exported, dataclasses.replace(CONFIG, window_ms=100), act)
    first = rows()[60]
    merged = [row | {name: first[name] for name in ("user", "tags")} for row in rows()[60:65]]
    bodies[-1] = json.dumps({"candidates": merged}).encode()
    for body, (status, _, answer) in zip(bodies, found, strict=True):
        assert status == 200 and answer["step"] == 3
        wanted = truth(exported, service.reader, body)
        np.testing.assert_allclose(answer["scores"]["logit"], wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(answer["scores"]["probability"], 1 / (1 + np.exp(-wanted)), rtol=1e-5)
    assert 'recjax_requests_total{status="200"} 5.0' in metrics and "recjax_candidates_total 22.0" in metrics
    together = float(re.search(r"recjax_batch_requests_count ([0-9.]+)", metrics)[1])
    assert together < 5 and service.under_way == 0


class Held:
    """A scorer whose first batch ends when `gate` is set, and fails then the first time if it is to."""

    def __init__(self, scorer, fails):
        self._scorer, self._fails, self.starts, self.gate = scorer, fails, 0, threading.Event()
        self.most, self.compiled = scorer.most, scorer.compiled

    def start(self, requests):
        self.starts += 1
        first, finish = self.starts == 1, self._scorer.start(requests)

        def wait():
            if first and self.gate.wait(20) and self._fails:
                raise RuntimeError("a program failed")
            return finish()

        return wait

    def __call__(self, requests):
        return self._scorer(requests)


@pytest.mark.parametrize("fails", [False, True])
def test_the_next_batch_starts_while_the_model_runs(exported, fails):
    """Two are under way, and never a third; each request gets its own scores, or the error of its own batch."""
    bodies = [request_of(range(at, at + 8)) for at in (0, 8, 16, 24)]  # each as much as is scored at once

    async def act(service, ask):
        service.scorer = held = Held(service.scorer, fails)
        tasks = [asyncio.create_task(ask("/score", body)) for body in bodies]
        for _ in range(500):
            if held.starts > 1:
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        before = held.starts
        held.gate.set()
        return service, before, await asyncio.gather(*tasks)

    service, before, found = run(exported, CONFIG, act)
    assert before == 2 and service.under_way == 0
    assert [status for status, _, _ in found].count(500) == int(fails)
    for body, (status, _, answer) in zip(bodies, found, strict=True):
        if status == 200:
            wanted = truth(exported, service.reader, body)
            np.testing.assert_allclose(answer["scores"]["logit"], wanted, rtol=1e-5, atol=1e-6)


def test_mistakes_are_answered(exported):
    async def act(service, ask):
        bad = [b"", b"{", b"[]", request_of(range(9)), b'{"candidates": [{"user": "x"}]}', b"\xff" * 100]
        answers = [await ask("/score", body, chunks=3) for body in bad]
        answers.append(await ask("/score", b"{" * 500, gone=True, chunks=2))
        large = await ask("/score", b" " * 60_000, chunks=7)
        waits = dict(body=b"{" * 50, chunks=2)
        slow = asyncio.create_task(ask_slowly(service, **waits))
        return answers, large, await slow, await ask("/"), await ask("/health"), await ask("/nothing")

    async def ask_slowly(service, body, chunks):
        from recjax.serving.server import make_app

        messages = [{"type": "http.request", "body": body, "more_body": True}]
        sent = []

        async def receive():
            return messages.pop() if messages else await asyncio.sleep(60)

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/score", "headers": [], "query_string": b""}
        await make_app(service)(scope, receive, send)
        return sent[0]["status"]

    answers, large, slow, about, health, nothing = run(exported, CONFIG, act)
    assert [status for status, _, _ in answers] == [400] * 7
    assert all(list(answer) == ["error"] and answer["error"].endswith(".") for _, _, answer in answers)
    assert (
        "candidates[0]: the key 'city' is missing" in answers[4][2]["error"] and "broke off" in answers[6][2]["error"]
    )
    assert large[0] == 413 and "60,000 bytes, and 20,000 are the most" in large[2]["error"]
    assert slow == 408 and health[::2] == (200, {"status": "ok"})
    assert nothing[0] == 404 and "GET /nothing: Not Found. There are POST /score, GET /" in nothing[2]["error"]
    assert about[2]["columns"] == ["user", "city", "tags", "age", "price"] and about[2]["user"] == ["user", "tags"]
    assert about[2]["scores"] == ["logit", "probability"] and about[2]["model"]["step"] == 3


def test_overload_is_refused_and_what_was_taken_is_answered(exported):
    """The model stands still until all have come."""

    async def act(service, ask):
        go, start = threading.Event(), service.scorer.start
        service.scorer.start = lambda requests: go.wait(30) and start(requests)
        asked = [asyncio.create_task(ask("/score", request_of([at]))) for at in range(10)]
        done, waiting = await asyncio.wait(asked, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        for _ in range(500):
            if len(done) < 6:
                done, waiting = await asyncio.wait(asked, timeout=0.02)
        service.draining = True
        ending = await ask("/health")
        go.set()
        await asyncio.wait(asked)
        return [task.result() for task in done], [task.result() for task in waiting], ending

    refused, taken, ending = run(exported, CONFIG, act)
    assert [status for status, _, _ in refused] == [503] * 6 and [status for status, _, _ in taken] == [200] * 4
    assert refused[0][1]["retry-after"] == "1" and "4 requests are under way" in refused[0][2]["error"]
    assert all(headers["connection"] == "close" for _, headers, _ in taken) and ending[0] == 503


def test_a_model_that_fails_is_said(exported):
    async def act(service, ask):
        def fails(requests):
            raise RuntimeError("no\n memory")

        def no_numbers(requests):
            return [np.full(request.size, np.nan) for request in requests]

        fails.most, fails.compiled, fails.start = 8, 0, fails
        no_numbers.most, no_numbers.compiled = 8, 0
        no_numbers.start = lambda requests: lambda: no_numbers(requests)
        plain, service.scorer = service.scorer, fails
        first = await asyncio.gather(*(ask("/score", request_of([at])) for at in range(3)))
        service.scorer = no_numbers
        second = await ask("/score", request_of([5]))
        large = await ask("/score", {"candidates": [rows()[4], rows()[5] | {"price": 1e30}]})
        service.scorer = plain
        return first, second, large, await ask("/score", request_of([5])), service.under_way

    first, second, large, third, left = run(exported, CONFIG, act)
    assert [status for status, _, _ in first] == [500] * 3 and "the model failed: no memory" in first[0][2]["error"]
    assert large[0] == 400 and "candidates[1]: dense column 'price' becomes " in large[2]["error"], "its value is why"
    assert second[0] == 500 and "is not finite" in second[2]["error"] and third[0] == 200 and left == 0


@pytest.mark.full
def test_a_damaged_row_on_disk_spoils_the_requests_that_need_it_alone(tmp_path):
    exported = export_shop(tmp_path, disk=["user"])
    entry = loader.read_manifest(exported)["tables"]["user"]
    service = Service(exported, CONFIG)
    ids = service.reader.read(request_of(range(6))).bags["user"].ids.ravel().tolist()
    row = next(id_ for id_ in ids if ids.count(id_) < 6)
    damaged = bytearray((exported / entry["file"]).read_bytes())
    damaged[4096 + 64 * row] ^= 1
    (exported / entry["file"]).write_bytes(damaged)

    async def act(service, ask):
        found = await asyncio.gather(*(ask("/score", request_of([at])) for at in range(4)))
        found += await asyncio.gather(*(ask("/score", request_of([at])) for at in (4, 5)))
        return found, (await ask("/metrics"))[2]

    found, metrics = run(exported, dataclasses.replace(CONFIG, window_ms=50), act)
    assert [status for status, _, _ in found] == [500 if id_ == row else 200 for id_ in ids]
    wrong = found[ids.index(row)][2]["error"]
    assert f"record {row} of " in wrong and entry["file"] in wrong and "is damaged" in wrong
    assert 'recjax_rows_read{table="user"}' in metrics


def test_examples_are_requests(exported):
    service = Service(exported, CONFIG)
    drawn = Examples(service)
    made = [drawn.request(np.random.default_rng(0), 5) for _ in range(2)]
    assert made[0] == made[1] and list(made[0]["user"]) == ["user", "tags"]
    given = service.reader.read(json.dumps(made[0]).encode())
    assert given.size == 5 and given.users == 1 and (given.bags["user"].ids > 0).all()
    assert np.abs(given.dense).max() < 10, "numbers are like those that trained"


@pytest.mark.full
@pytest.mark.parametrize("where", ["price>1", "price>10", "price=1|4"])
def test_a_run_of_chosen_rows_is_served(tmp_path, where):
    """Prices of log-normal data are drawn as of normal ones, so that many an example is no row of these data."""
    recjax.prepare(prices(), label="clicked", out=tmp_path / "data", columns="user:id,price:dense", where=where)
    data = ["data=prepared", f"data.path={tmp_path / 'data'}", "mesh.devices=1", "embedding.dim=4"]
    trainer = build_trainer(recjax.load("synthetic", data))
    write(trainer, trainer.init_state(), 0, tmp_path / "exported", data=trainer.source.path)
    service, example = server.opened(tmp_path / "exported", CONFIG)
    if "=" in where:  # which no draw is: the example shows the form alone
        assert example["candidates"][0].keys() | example["user"].keys() == {"user", "price"}
        return
    drawn = Examples(service)
    for request in (example, *(drawn.request(np.random.default_rng(seed), 8) for seed in range(20))):
        assert len(request["candidates"]) == (2 if request is example else 8)
        service.answer_now(json.dumps(request).encode())


def prices():
    rng = np.random.default_rng(0)
    users = [f"u{at % 7}" for at in range(300)]
    return {"user": users, "price": np.ceil(rng.lognormal(0, 2, 300)), "clicked": rng.integers(0, 2, 300)}


@pytest.mark.full
def test_several_labels_and_a_table_of_ones_own(tmp_path):
    """From the table to the answer; the truth is `predict`."""
    table = tables.clicks()
    recjax.prepare(table, label="clicked,when:number", out=tmp_path / "data", columns="auto")
    data = ["data=prepared", f"data.path={tmp_path / 'data'}", "mesh.devices=1", "model=shared_bottom", "plan=auto"]
    trainer = build_trainer(recjax.load("synthetic", [*data, "embedding.dim=4"]))
    state = trainer.init_state()
    write(trainer, state, 0, tmp_path / "exported", data=trainer.source.path)
    service = Service(tmp_path / "exported", CONFIG)
    assert service.about["scores"] == ["clicked.logit", "clicked.probability", "when.prediction"]
    request = Examples(service).request(np.random.default_rng(0), 4)
    scores = json.loads(service.answer_now(json.dumps(request).encode()))["scores"]
    batch = batch_of(trainer, [row | request["user"] for row in request["candidates"]], tmp_path)
    (found,) = [x for _, x in trainer.predict(state, trainer.inputs_of([batch], 4))]
    np.testing.assert_allclose(scores["clicked.logit"], found[:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(scores["when.prediction"], found[:, 1], rtol=1e-5, atol=1e-6)


def batch_of(trainer, made, folder):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    described = trainer.source.about["table"]
    (part,) = json_lines_of_table(folder / "rows.jsonl", described, RowFaults())
    return open_encoder(trainer.source.path).encode(part.chunk)


def test_refusals(exported, tmp_path, monkeypatch):
    assert_refused(inside("serve", tmp_path, "--port", "0"), 2, "is not a run folder")
    assert_refused(inside("serve", exported, "--quantize", "int8", "--port", "0"), 2, "is an export already")
    assert_refused(inside("serve", exported, "--queue", "0"), 2, "queue is 0; give 1 or more")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_refused(inside("serve", exported, "--port", port), 2, f"cannot listen on 127.0.0.1:{port}: .*in use")
    assert_refused(inside("serve", exported, "--port", "70000"), 2, "--port 70000: ports are 0")
    monkeypatch.setattr(server, "_PACKAGES", ("fastapi", "no_such_package"))
    with pytest.raises(ConfigError, match="needs the package no-such-package.*extra `serve`"):
        server.require()


@pytest.mark.full
def test_from_a_run_folder_to_an_answer_and_sigterm_under_load(tmp_path, preset):
    """Two commands; then eight clients, and the end: every request that was taken is answered."""
    assert inside("train", preset, *SMALL, "--out", tmp_path / "run").status == 0
    options = ("--port", "0", "--json", "--most-candidates", "8", "--queue", "4", "--user", "sparse_0")
    with start("serve", tmp_path / "run", *options) as process:
        described = json.loads(process.stdout.readline())
        port = int(described["url"].rpartition(":")[2])
        body = json.dumps(described["example"])
        counts, lock, stop = {}, threading.Lock(), threading.Event()

        def client():
            while not stop.is_set():
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                try:
                    connection.request("POST", "/score", body)
                    status = connection.getresponse().status
                except (ConnectionError, http.client.HTTPException) as error:
                    status = type(error).__name__
                finally:
                    connection.close()
                with lock:
                    counts[status] = counts.get(status, 0) + 1
                if not isinstance(status, int):
                    return

        clients = [threading.Thread(target=client) for _ in range(8)]
        for thread in clients:
            thread.start()
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        stop.set()
        for thread in clients:
            thread.join()
    assert process.returncode == 143 and "Traceback" not in err, err
    answered = int(re.search(r"stopped by SIGTERM: ([0-9,]+) requests were answered\.", err)[1].replace(",", ""))
    assert answered == sum(n for status, n in counts.items() if isinstance(status, int)), counts
    assert set(counts) <= {200, 503, "ConnectionRefusedError", "ConnectionResetError"} and counts[200] > 10, counts
    assert not list(tmp_path.glob("recjax-serve-*"))
