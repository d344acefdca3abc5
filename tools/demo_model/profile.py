"""Time one training step by document length and phase on this machine: `python -m tools.demo_model.profile`."""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from tools.demo_model.chat import save_tokenizer, train_tokenizer
from tools.demo_model.data import BatchSize, BatchStream
from tools.demo_model.model import Compiled, Weights
from tools.demo_model.optim import MATRICES, TARGET_RATES, Optimizer, balance_experts
from tools.demo_model.shape import Shape
from tools.demo_model.step import Phase, Stepper

CASES = ((1024, False), (2816, False), (4224, False), (4224, True), (8448, True), (1024, True))
TIMED_STEPS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--kernels", type=int, default=25, help="kernels to list for the last but one case")
    options = parser.parse_args()
    shape, size = Shape(), BatchSize()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(train_tokenizer(shape.vocab_size), Path(folder))
        print(f"tokenizer {time.perf_counter() - start:.1f} s", flush=True)
        per_case = TIMED_STEPS + 2
        stream = BatchStream(
            Path(folder) / "tokenizer.json",
            size,
            shape.block,
            lambda step: CASES[min(step // per_case, len(CASES) - 1)][0],
            options.workers,
        )
        problems, documents = stream.problems(), stream.documents()
        device = torch.device("cuda")
        torch.set_float32_matmul_precision("high")
        weights = Weights(shape, seed=0).to(device)
        stepper = Stepper(weights, Compiled(shape, compile_functions=True), size, device, torch.bfloat16)
        optimizer = Optimizer(weights, MATRICES, TARGET_RATES)

        def one_step(phase: Phase) -> None:
            result = stepper.run(next(problems), next(documents), phase)
            optimizer.step(0.1)
            balance_experts(weights, 0.1, result.expert_counts)

        for number, (length, selection) in enumerate(CASES):
            phase = Phase(selection=selection, hide=True)
            start = time.perf_counter()
            one_step(phase)
            one_step(phase)
            torch.cuda.synchronize()
            first = time.perf_counter() - start
            start = time.perf_counter()
            for _ in range(TIMED_STEPS - 1):
                one_step(phase)
            torch.cuda.synchronize()
            each = (time.perf_counter() - start) / (TIMED_STEPS - 1)
            memory = torch.cuda.max_memory_allocated() / 2**30
            print(
                f"{length} selection={selection}: {1e3 * each:.1f} ms, first {first:.1f} s, {memory:.1f} GiB",
                flush=True,
            )
            if number == len(CASES) - 3:
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                    one_step(phase)
                    torch.cuda.synchronize()
                table = profiler.key_averages().table(
                    sort_by="self_cuda_time_total", row_limit=options.kernels, max_name_column_width=90
                )
                print("\n".join(line[:92] + line[-80:] for line in table.split("\n")), flush=True)
            else:
                one_step(phase)
        stream.close()


if __name__ == "__main__":
    main()
