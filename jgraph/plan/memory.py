"""How much memory the values of a step take on each task."""

from collections import Counter

from jgraph.plan.nodes import SegmentNode, inputs_of, outputs_of
from jgraph.plan.program import Partition


def peak_nbytes(partition: Partition) -> int:
    """Returns the most bytes of values that a task holds at one time of a step.

    Values are let go of after their last use. Variables are not counted, nor what XLA
    needs inside a segment. Where the order is not determined, nodes are taken to run in
    that of the partition.

    Args:
      partition: of the task.
    """
    uses = Counter(v for node in partition.nodes for v in set(inputs_of(node)))
    sizes = [type_.nbytes for type_ in partition.values]
    held = peak = 0
    for node in partition.nodes:
        taken = set(inputs_of(node))
        reused = 0
        if isinstance(node, SegmentNode):
            reused = sum(sizes[node.inputs[place]] for place in node.donate)
        held += sum(sizes[v] for v in outputs_of(node) if uses[v])
        peak = max(peak, held - reused)
        for value in taken:
            uses[value] -= 1
            held -= sizes[value] if not uses[value] else 0
    return peak
