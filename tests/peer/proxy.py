"""Bad network: a TCP proxy on loopback between clients and one port."""

import asyncio
import random
import threading
from contextlib import suppress
from typing import Self


class Proxy:
    """Proxy of 127.0.0.1:`target` on the port `proxy.port`; all attributes may change at any time.

    `rate` is in bytes per second, for each direction of a connection. `delay` is the travel time in
    seconds, and `drop` the number of random cuts per second.
    """

    def __init__(
        self,
        target: int,
        *,
        rate: float | None = None,
        delay: float = 0.0,
        drop: float = 0.0,
        seed: int = 0,
        port: int = 0,
    ) -> None:
        self.target, self.rate, self.delay, self.drop, self.port = target, rate, delay, drop, port
        self.connections = self.dropped = 0
        self.passed = [0, 0]  # bytes to the target, bytes from it
        self._draw = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait(120)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    def pause(self) -> None:
        """Stop all traffic until `resume`."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def resume(self) -> None:
        """Resume the traffic."""
        self._loop.call_soon_threadsafe(self._flowing.set)

    def cut(self) -> None:
        """Abort all connections."""
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()

    async def _main(self) -> None:
        self._end, self._flowing = asyncio.Event(), asyncio.Event()
        self._flowing.set()
        server = await asyncio.start_server(self._connection, "127.0.0.1", self.port, limit=2**16)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._end.wait()
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._cut()
        await asyncio.sleep(0)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        with suppress(asyncio.CancelledError):
            await self._pass_on(reader, writer)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flowing.wait()
        try:
            target_reader, target_writer = await asyncio.open_connection(
                "127.0.0.1", self.target, limit=2**16
            )
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(target_writer)
        pumps = [
            asyncio.create_task(self._pump(reader, target_writer, 0)),
            asyncio.create_task(self._pump(target_reader, writer, 1)),
        ]
        cutter = asyncio.create_task(self._cutter())
        try:
            await asyncio.wait([*pumps, cutter], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*pumps, cutter):
                task.cancel()
            for stream in (writer, target_writer):
                stream.transport.abort()
                self._writers.discard(stream)

    async def _cutter(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            if self._draw.random() < 0.05 * self.drop:
                self.dropped += 1
                return

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: int
    ) -> None:
        """Forward data after `delay` seconds, at most `rate` bytes per second."""
        travelling: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=64)

        async def arrive() -> None:
            while True:
                arrival, data = await travelling.get()
                await asyncio.sleep(max(0.0, arrival - self._loop.time()))
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
                self.passed[direction] += len(data)
                if not data:
                    return

        arriving = asyncio.create_task(arrive())
        try:
            while True:
                data = await reader.read(2**14)
                await travelling.put((self._loop.time() + self.delay, data))
                if not data:
                    await arriving
                    return
                if self.rate:
                    await asyncio.sleep(len(data) / self.rate)
        except OSError:
            return
        finally:
            arriving.cancel()
