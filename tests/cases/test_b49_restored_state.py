"""Case B49: what one process saved is really used in another, whose hashes of str and bytes differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROMPT = [*range(1, 101)]

COMMON = """
import json, sys
import numpy as np
from paged import PrefixCache, Session, load_model, page_hash
from paged.prefix.hashing import extend_keys

source, path, prompt, at = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
model = load_model(source)
cache = PrefixCache(model.create_kv_pool(16, page_size=16, kv_dtype="fp32"), partial=False)
rows = []
forward = model.forward
model.forward = lambda batch, storage: (rows.append(len(batch.tokens)), forward(batch, storage))[1]

def fresh():
    return Session(model, cache.pool)

def go_on(session, rest):
    \"\"\"The bits of the logits after `rest`, and six greedy tokens from there.\"\"\"
    logits, tokens = session.eval(rest), []
    bits = logits.numpy().tobytes().hex()
    for _ in range(6):
        tokens.append(int(logits.argmax()))
        logits = session.eval(tokens[-1:])
    return bits, tokens

def chain_hash():
    keys = []
    extend_keys(keys, cache.cursor().root, np.arange(1, 65, dtype=np.int32), 16, page_hash)
    return keys[-1].hex(), hash("a str hashes as this process does")
"""

SAVE = (
    COMMON
    + """
session = fresh()
session.eval(prompt[:at])
cache.insert(session, prompt[:at], preview="the prompt")
session.release()
cold = go_on(fresh(), prompt)
print(json.dumps({"cold": cold, "saved": cache.save(path), "hash": chain_hash()}))
"""
)

LOAD = (
    COMMON
    + """
loaded, matched = cache.load(path), cache.match_len(prompt)
session = fresh()
attached = cache.attach(session, prompt)
warm = go_on(session, prompt[attached:])
computed, again = rows[0], cache.load(path)
session.release()
cache.check()
cache.pool.check()
print(json.dumps({
    "warm": warm, "loaded": loaded, "matched": [matched, attached], "computed": computed, "hash": chain_hash(),
    "again": again, "live": cache.pool.num_live,
}))
"""
)


def process(code: str, seed: int, *args: object) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("source", "stop", "matched"), [("tiny:llama", 100, 96), ("tiny:hybrid", 90, 90)])
def test_a_restored_prompt_costs_what_it_lacks_and_gives_what_it_gave(tmp_path, source, stop, matched) -> None:
    """Of the pages the whole ones serve; of the hybrid the checkpoint, the partial last page with it."""
    path, prompt = tmp_path / "cache.safetensors", json.dumps(PROMPT)
    one = process(SAVE, 1, source, path, prompt, stop)
    two = process(LOAD, 2, source, path, prompt, stop)
    assert one["hash"][1] != two["hash"][1]
    assert one["hash"][0] == two["hash"][0]  # the chain hash of [1..64]
    assert one["saved"] == two["loaded"] == 6
    assert two["matched"] == [matched, matched]
    assert two["computed"] == 100 - matched
    assert two["warm"] == one["cold"]
    assert (two["again"], two["live"]) == (0, 0)
