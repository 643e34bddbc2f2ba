import json, logging, subprocess, sys, time
from pathlib import Path
from statistics import median
import os
OUT = Path(os.environ.get("OUT_JOB", "/tmp"))
T0 = time.time()
def say(*a): print(f"[{time.time()-T0:5.1f}]", *a, flush=True)

def rate():
    import jax, jax.numpy as jnp
    d = jax.local_devices()[0]
    H = jax.sharding.SingleDeviceSharding(d, memory_kind="pinned_host")
    D = jax.sharding.SingleDeviceSharding(d)
    for mib in (64, 256, 1024):
        x = jax.device_put(jnp.zeros((mib << 19,), jnp.bfloat16), H); jax.block_until_ready(x)
        f = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device), out_shardings=D)
        ts = []
        f(x).block_until_ready()
        for _ in range(8):
            t = time.perf_counter(); f(x).block_until_ready(); ts.append(time.perf_counter() - t)
        say(f"H2D {mib} MiB: {(mib<<20)/median(ts)/1e9:.1f} GB/s")

def engine(kind, gib, more):
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for n in ("jax", "jax._src"): logging.getLogger(n).setLevel(logging.WARNING)
    logging.getLogger("jaxpaged.runtime.compilation").setLevel(logging.WARNING)
    import numpy as np, jax
    from benchmarks.decode_latency import dummy_llm, seconds
    from jaxpaged import SamplingParams
    model = Path("benchmarks/models/qwen2.5-7b.json")
    cfg = dict(cpu_offload_gb=gib, compile_cache_dir="none", max_num_batched_tokens=8192, max_model_len=8400, **more)
    with dummy_llm(model, 128, 32, 64, "bfloat16", **cfg) as llm:
        say(kind, "ready", llm.info.startup_seconds)
        dev = jax.local_devices()[0]
        mem = lambda: {k: round(v/2**30, 2) for k, v in (dev.memory_stats() or {}).items() if k in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")}
        say(kind, mem())
        draw = np.random.default_rng(0)
        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
        prompts = draw.integers(0, llm.info.vocab_size, (4, 40)).tolist()
        outs = llm.generate(prompts, greedy, use_tqdm=False)
        tokens = [list(o.outputs[0].token_ids) for o in outs]
        lps = [[next(iter(p.values())).logprob for p in o.outputs[0].logprobs] for o in outs]
        (OUT / f"tokens_{kind}.json").write_text(json.dumps([tokens, lps]))
        if kind == "sized":
            say(kind, mem()); return
        for size, context in ((1, 128), (64, 128)):
            ps = draw.integers(0, llm.info.vocab_size, (size, context)).tolist()
            steps = 32 if gib == 0 else 12
            for c in (1, 1 + steps): seconds(llm, ps, c)
            s = median(seconds(llm, ps, 1) for _ in range(3)); l = median(seconds(llm, ps, 1 + steps) for _ in range(3))
            say(kind, f"B {size}: {1e3*(l-s)/steps:.2f} ms a step; prefill+1 {1e3*s:.1f} ms")
        found = []
        for r in range(4):
            ps = draw.integers(0, llm.info.vocab_size, (1, 8190)).tolist()
            found.append(seconds(llm, ps, 1))
        say(kind, "8190-token prompt ms", [round(1e3*x, 1) for x in found])
        say(kind, mem())

if len(sys.argv) > 1:
    {"rate": rate, "engine": lambda: engine(sys.argv[2], float(sys.argv[3]), json.loads(sys.argv[4]))}[sys.argv[1]]()
    sys.exit()
pool = json.dumps({"kv_cache_memory_bytes": 4 << 30})
for args in (["rate"], ["engine", "base", "0", pool], ["engine", "off", "4", pool], ["engine", "sized", "4", "{}"]):
    say(args)
    r = subprocess.run([sys.executable, __file__, *args], env=os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".92"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=150)
    print("\n".join(x for x in r.stdout.splitlines() if "%|" not in x)[-5000:], flush=True)
try:
    a, b, c = (json.loads((OUT / f"tokens_{k}.json").read_text()) for k in ("base", "off", "sized"))
    say("tokens equal", a[0] == b[0], a[0] == c[0], "first logprob diff", max(abs(x[0]-y[0]) for x, y in zip(a[1], b[1])))
except Exception as e: say(e)
