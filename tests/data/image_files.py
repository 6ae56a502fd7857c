"""Small files in the formats of the data sets, and a local HTTP server for downloads."""

import functools
import gzip
import hashlib
import http.server
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedcb2o.data.release import Release


def idx(values: np.ndarray) -> bytes:
    """Return an IDX file."""
    header = bytes((0, 0, 8, values.ndim)) + b"".join(
        size.to_bytes(4, "big") for size in values.shape
    )
    return header + values.astype(np.uint8).tobytes()


def contents(train: int = 3, test: int = 2) -> dict[str, bytes]:
    """Return shuffled gzip files with MNIST's names; pixel (1, 2) is the label.

    `train` and `test` are numbers of images per class.
    """
    draw, files = np.random.default_rng(0), {}
    for part, per_class in (("train", train), ("t10k", test)):
        labels = draw.permutation(np.repeat(np.arange(10), per_class))
        images = draw.integers(0, 256, (len(labels), 28, 28))
        images[:, 1, 2] = labels
        files[f"{part}-images-idx3-ubyte.gz"] = gzip.compress(idx(images), 1)
        files[f"{part}-labels-idx1-ubyte.gz"] = gzip.compress(idx(labels), 1)
    return files


def write(folder: Path, files: dict[str, bytes], zipped: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    for name, body in files.items():
        path = folder / name
        (path if zipped else path.with_suffix("")).write_bytes(
            body if zipped else gzip.decompress(body)
        )
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def md5(body: bytes) -> str:
    return hashlib.md5(body).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """HTTP handler of files by name. Under /half/NAME it sends half of the announced bytes."""

    bodies: Mapping[str, bytes]

    def do_GET(self):
        folder, _, name = self.path.rpartition("/")
        body = self.bodies.get(name, b"")
        self.send_response(200 if name in self.bodies else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if folder == "/half" else body)

    def log_message(self, *args):
        """Log nothing."""


@contextmanager
def served(bodies: Mapping[str, bytes]) -> Iterator[str]:
    """Serve `bodies` within the context; yield the address."""
    server = http.server.HTTPServer(
        ("127.0.0.1", 0), type("Serves", (Handler,), {"bodies": bodies})
    )
    thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.01))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def at(release: Release, url: str, bodies: Mapping[str, bytes]) -> Release:
    """Return the release as if published at `url` with the files `bodies`."""
    return replace(release, url=url, md5={name: md5(body) for name, body in bodies.items()})
