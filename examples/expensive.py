"""An expensive simulator in processes that die and lie: `fedcb2o.Search` with named workers.

    python examples/expensive.py

Four processes evaluate one point at a time, in any order. One dies after 20 points, one returns a
wrong value for every third point. The search hands the points of the dead one to others, repeats
values that matter elsewhere, and keeps every value in `expensive.jsonl`: an interrupted search
continues there.
"""

import argparse
import math
import multiprocessing
import multiprocessing.connection
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import NonlinearConstraint

import fedcb2o

BOX = [(0.05, 1.0), (0.05, 1.0)]


def simulate(point: np.ndarray) -> tuple[float, float]:
    """Return the mass of a beam of some width and height, and its largest stress."""
    width, height = point
    return float(width * height), float(0.1 / (width * height**2))


def work(pipe: Any, fault: str) -> None:
    """Evaluate points until the end of the pipe; die or lie as the fault says."""
    count = 0
    while (point := pipe.recv()) is not None:
        count += 1
        if fault == "dies" and count > 20:
            return
        mass, stress = simulate(point)
        if fault == "lies" and count % 3 == 0:
            mass, stress = 0.0, 0.0
        pipe.send((mass, stress))


def main() -> None:
    """Search, and print the answer and the suspicion of each worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, default=Path("expensive.jsonl"))
    parser.add_argument("--maxfev", type=int, default=400)
    options = parser.parse_args()

    # 1. The problem: the least mass with a stress of at most 1. Both are measured.
    strong = NonlinearConstraint(None, -np.inf, 1.0)
    search = fedcb2o.Search(
        bounds=BOX, constraints=strong, maxfev=options.maxfev, file=options.file
    )

    # 2. The workers.
    pipes = {}
    processes = []
    for name, fault in (("ada", ""), ("bob", "dies"), ("eve", "lies"), ("kim", "")):
        pipes[name], end = multiprocessing.Pipe()
        processes.append(multiprocessing.Process(target=work, args=(end, fault), daemon=True))
        processes[-1].start()
        end.close()

    # 3. The search: every idle worker receives a point, and values come back in any order.
    sent: dict[str, Any] = {}
    while not search.done:
        for name in set(pipes) - set(sent):
            points = search.ask(1, name).numpy()
            if len(points):
                sent[name] = points[0]
                pipes[name].send(points[0])
        names = {pipe: name for name, pipe in pipes.items() if name in sent}
        for pipe in multiprocessing.connection.wait(list(names)):
            name = names[pipe]
            try:
                values = pipe.recv()
            except EOFError:
                print(f"{name} died")
                search.drop(name)
                del pipes[name], sent[name]
                continue
            search.tell([values], points=[sent.pop(name)], worker=name)
            if search.done:
                break

    # 4. The answer.
    for name, pipe in pipes.items():
        pipe.send(None)
        print(f"{name}: suspicion {search.suspicion(name):.2f}")
    print(search.result)
    mass, stress = simulate(search.result.x.numpy())
    print(f"mass {mass:.4f} (the least is {math.sqrt(0.1 * 0.1) / 1:.4f}), stress {stress:.4f}")


if __name__ == "__main__":
    main()
