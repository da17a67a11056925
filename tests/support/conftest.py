"""What pytest is not to import: one file instruments all of jgraph for a fuzzer, the
other needs Ray."""

collect_ignore = ["fuzz/decoders.py", "ray_session.py"]
