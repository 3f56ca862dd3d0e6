"""What ONNX Runtime's CPU kernels take in memory while a node runs, besides inputs and outputs.

The rules are those of its sources, and measured (1.31): each is an upper bound for the sizes that
are known. Where kernels differ from processor to processor, or from one number of threads to
another, the one that takes the most counts. So attention counts as if no kernel made its products
piece by piece where that depends on what is known of the processor's cache, as on ARM it is not.

Nearly all comes from the arena, and stays in it. Some kernels take memory from the system itself,
and give it back when the node has run: it is never in the place of what other nodes had, and no
limit of the arena holds it back.
"""

from shoal_compiler.shaped import Shaped, Unknown
from shoal_compiler.workspaces import attention, convolutions, einsum, others, recurrent
from shoal_compiler.workspaces.workspace import Workspace

_RULES = {
    **attention.RULES,
    **convolutions.RULES,
    **einsum.RULES,
    **recurrent.RULES,
    **others.RULES,
}


def workspace(shaped: Shaped) -> Workspace:
    """What the runtime needs while the node runs; nothing where no rule is known, or a size."""
    rule = _RULES.get(shaped.node.op_type)
    try:
        return Workspace() if rule is None else rule(shaped)
    except (Unknown, LookupError, ValueError, ArithmeticError):
        return Workspace()
