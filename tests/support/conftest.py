"""What pytest is not to import: one file instruments all of jgraph for a fuzzer, the
others need Ray and tritonclient."""

collect_ignore = ["fuzz/decoders.py", "ray_session.py", "triton_judge.py"]
