"""One site: it takes models by its own decision, trains, and sends its model."""

import argparse
from collections import defaultdict

import nvflare.client as flare
from hospitals import Hospital


def main() -> None:
    """Run the site until the job ends."""
    parser = argparse.ArgumentParser()
    for name in ("--method", "--attack", "--case"):
        parser.add_argument(name)
    parser.add_argument("--seed", type=int)
    options = vars(parser.parse_args())

    flare.init()
    site = int(flare.get_site_name().removeprefix("site-")) - 1
    hospital = Hospital(site, **options)
    while flare.is_running():
        task = flare.receive()
        models: dict[int, dict] = defaultdict(dict)
        for key, values in task.params.items():
            sender, _, name = key.partition("/")
            if name:
                models[int(sender.removeprefix("site-")) - 1][name] = values
        claims = task.meta.get("samples", {})
        samples = {int(name.removeprefix("site-")) - 1: n for name, n in claims.items()}
        if models:
            del models[site]
            hospital.decide(models, samples)
        accuracy = hospital.accuracy()
        if task.current_round < task.total_rounds:
            hospital.train()
        flare.send(
            flare.FLModel(
                params=hospital.agent.publish(),
                metrics={"accuracy": accuracy},
                meta={"samples": len(hospital.y)},
            )
        )


if __name__ == "__main__":
    main()
