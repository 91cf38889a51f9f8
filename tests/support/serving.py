"""A service of a small export of the shop's data, and requests to its application without a network."""

import asyncio
import contextlib
import json

import recjax
from recjax.data.storage.blocks import open_prepared
from recjax.serving.export import write
from recjax.train.build import build_trainer
from support.shop import prepare_shop


def export_shop(folder, **how):
    """Exports an untrained model on the shop's data; `how` as for `write`. Returns the export."""
    if not (folder / "data").exists():
        prepare_shop(folder / "data")
    data = ["data=prepared", f"data.path={folder / 'data'}", "model.interaction=cat", "plan=auto"]
    config = recjax.load("synthetic", [*data, "embedding.dim=4", "model.bottom=8-4", "model.top=8-1", "mesh.devices=1"])
    trainer = build_trainer(config)
    write(trainer, trainer.init_state(), 3, folder / "exported", data=open_prepared(folder / "data").path, **how)
    return folder / "exported"


async def ask(app, path="/score", body=b"", chunks=1, gone=False):
    """Sends a request to an ASGI application, in pieces.

    Args:
      app: the application.
      path: of the request, a POST to /score or else a GET.
      body: its text, or what becomes one as JSON.
      chunks: pieces that the body comes in.
      gone: the client leaves after the first piece.

    Returns:
      (status, headers, what the answer is as JSON, or its text).
    """
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = -(-len(text) // chunks) or 1
    pieces = [text[start : start + size] for start in range(0, max(len(text), 1), size)]
    messages = [{"type": "http.request", "body": p, "more_body": n < len(pieces) - 1} for n, p in enumerate(pieces)]
    if gone:
        messages[1:] = [{"type": "http.disconnect"}]
    sent = []

    async def receive():
        if messages:
            return messages.pop(0)
        await asyncio.sleep(60)  # nothing more comes
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    method = "POST" if path == "/score" else "GET"
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path}
    scope |= {"raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": [], "scheme": "http"}
    scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
    await app(scope, receive, send)
    answer = b"".join(message.get("body", b"") for message in sent[1:])
    headers = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, json.loads(answer) if "json" in headers["content-type"] else answer.decode()


@contextlib.asynccontextmanager
async def running(service):
    """The application of a service, with the service running."""
    from recjax.serving.server import make_app

    async with service.running():
        yield make_app(service)
