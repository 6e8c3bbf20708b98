"""Both clients behind one face, so that every test of one is a test of the other."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Coroutine, Iterator

from longtake.client import AsyncClient, Client


class Awaited:
    """An `AsyncClient` that is called as a `Client` is."""

    def __init__(self, url: str, **options: object) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(url, **options)  # type: ignore[arg-type]

    def __enter__(self) -> "Awaited":
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def __getattr__(self, name: str) -> object:
        method = getattr(self._client, name)

        def call(*arguments: object, **named: object) -> object:
            made = method(*arguments, **named)
            return self._runner.run(made) if inspect.iscoroutine(made) else self._each(made)

        return call

    def _each(self, made: AsyncGenerator[object, None]) -> Iterator[object]:
        def run(step: Coroutine[object, object, object]) -> object:
            return self._runner.run(step)

        try:
            while True:
                yield run(_awaited(anext(made)))
        except StopAsyncIteration:
            return
        finally:
            run(made.aclose())


async def _awaited(step: object) -> object:
    return await step  # type: ignore[misc]


KINDS = {"sync": Client, "async": Awaited}
