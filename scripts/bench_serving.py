"""What serving must show, measured on a decoder bundle in one run: a table for each experiment, then one JSON line.

    python scripts/bench_serving.py BUNDLE [--quick] [--only batching,prefixes] [--out PAGE] [--peer smollm2]

Experiments: steps (what one costs), batching (continuous against static), prefixes (a shared beginning), interference
(a long prompt among streams), lanes (interactive under batch load), switches (speculation, overlap, swapping). Takes 80
minutes, a tenth of that with --quick. Exits with 1 when a claim does not hold. --peer names the model that the bundle
was built from, and measures transformers on it, which needs torch.
"""

import argparse
import json
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from serving_bench.batching import batching
from serving_bench.interference import interference
from serving_bench.lanes import lanes
from serving_bench.page import page, section
from serving_bench.peer import peer
from serving_bench.prefixes import prefixes
from serving_bench.setting import Setting
from serving_bench.steps import steps
from serving_bench.switches import switches

from engines.bundle import open_bundle
from pipeline.floors import decoder_work_from_graph
from pipeline.limits import best_limits, measure_limits
from plugins.measure import usable_cpus

EXPERIMENTS = {
    "steps": steps,
    "batching": batching,
    "prefixes": prefixes,
    "interference": interference,
    "lanes": lanes,
    "switches": switches,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--quick", action="store_true", help="one repetition of smaller experiments")
    parser.add_argument("--only", default=",".join(EXPERIMENTS), help="names, with commas between them")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peer", metavar="MODEL", help="also measure transformers, on this model")
    parser.add_argument("--out", type=Path, metavar="PAGE", help="write the tables as a page")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := sorted(set(names) - set(EXPERIMENTS)):
        parser.error(f"no experiment is called {unknown[0]}; there are {', '.join(EXPERIMENTS)}")
    setting = _setting(arguments)
    findings = []
    for name in names:
        setting = replace(setting, limits=best_limits(setting.limits, measure_limits(setting.threads)))
        findings.append(EXPERIMENTS[name](setting))
        print(section(findings[-1]), flush=True)
    if arguments.peer:
        findings.append(peer(setting, arguments.peer))
        print(section(findings[-1]), flush=True)
    if arguments.out:
        command = shlex.join(["python", "scripts/bench_serving.py", *sys.argv[1:]])
        arguments.out.write_text(page(setting, command, findings))
    limits = asdict(setting.limits)
    print(
        json.dumps(
            {
                "limits": limits,
                "experiments": {f.name: {**f.data, "verdicts": [asdict(v) for v in f.verdicts]} for f in findings},
            }
        )
    )
    return 0 if all(verdict.holds for found in findings for verdict in found.verdicts) else 1


def _setting(arguments: argparse.Namespace) -> Setting:
    bundle = open_bundle(arguments.bundle)
    decoder = bundle.manifest.decoder
    if decoder is None:
        raise SystemExit(f"{arguments.bundle} is no decoder; expected a bundle of a language model")
    threads = usable_cpus()
    return Setting(
        bundle=bundle,
        threads=threads,
        repetitions=1 if arguments.quick else arguments.repetitions,
        quick=arguments.quick,
        seed=arguments.seed,
        vocabulary=decoder.vocab_size,
        work=decoder_work_from_graph(bundle.engine_path, decoder),
        limits=measure_limits(threads),
    )


if __name__ == "__main__":
    sys.exit(main())
