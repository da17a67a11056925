"""What pytest is not to import: it instruments all of jgraph for a fuzzer."""

collect_ignore = ["decoders.py"]
