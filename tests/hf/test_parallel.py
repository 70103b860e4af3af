"""Models of transformers whose sequences two processes share.  As a script it is one of these."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the Hugging Face integration needs transformers")


@pytest.mark.slow
def test_shared_sequences(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, __file__, str(tmp_path / "found.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert "got attention_mask" in found.pop("padded")
    assert found.keys() == {"gpt2 1", "gpt2 2", "llama 1", "llama 2"}
    assert all(error < 1e-5 for error in found.values())


def main(path: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import tamis.hf
    from hf import tiny
    from tamis.parallel import ContextParallel

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("context",))
    found = {}
    for name in ("gpt2", "llama"):
        torch.manual_seed(0)
        model = tamis.hf.sparsify(tiny.build(name)).eval()
        for rows in (1, 2):
            tokens = torch.randint(model.config.vocab_size, (rows, 16))
            expected = model(tokens, use_cache=False).logits
            with ContextParallel(mesh) as context:
                own = context.take(tokens)
                places = context.places(own.shape[1], own.device)
                logits = model(own, position_ids=places, use_cache=False).logits
                found[f"{name} {rows}"] = (context.join(logits) - expected).abs().max().item()
                try:
                    model(own, attention_mask=torch.tensor([0, *[1] * 7]).expand_as(own), position_ids=places)
                except ValueError as error:
                    found["padded"] = str(error)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
