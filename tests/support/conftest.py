"""What pytest is not to import: one file instruments all of jgraph for a fuzzer, the
others need Ray, Spark and tritonclient."""

collect_ignore = [
    "fuzz/decoders.py",
    "ray_session.py",
    "spark_session.py",
    "triton_judge.py",
]
