"""All names of smp on users' objects, and the change of an object's class.

Other rooms have such names from here: ``tests/test_source.py`` looks for that.  Each section
has the names of one kind of object, the copies with these names, and their end.
`smp.DistributedModel` is no user's class: its own attributes are in ``smp/model.py``.  Methods
of smp's classes for users' tensors begin with ``_smp_``, too, beside PyTorch's.
"""

from typing import Any

# In the __dict__ of a module: the script's wishes.  Copies and pickles have them.  End: the
# module's.
PIN = "_smp_partition"  # its pin
TOGETHER = "_smp_together"  # the module has one rank with all in it
TENSOR_PARALLELISM = "_smp_tensor_parallelism"  # its configuration for the split, or None
MADE_WITH = "_smp_made_with"  # (args, kwargs) of its __init__
OWN_HOOKS = "_smp_own_hooks"  # the hooks registered by its __init__

# In the __dict__ of a module with a stand-in class: values of this job.  Copies and pickles do
# not have them; a copy of a checkpointed module is checkpointed again.  End: the module's.
GATE = "_smp_gate"  # the number of its gate
SWITCHES = "_smp_switches"  # a step has set ``training``
RUNS = "_smp_runs"  # of an nn.Sequential: the runs of children with one owner
CHECKPOINTING = "_smp_checkpointing"  # arguments of smp.set_activation_checkpointing
KEPT = "_smp_kept"  # attributes with a value for each microbatch
ORDER = "_smp_order"  # the gate for attributes set later
OF_JOB = (GATE, SWITCHES, RUNS, CHECKPOINTING, KEPT, ORDER)

# In the __dict__ of a module of a split model.  A module with slices refuses copies and
# pickles; those of other modules have them.  End: the module's.
PATH = "_smp_tensor_parallel_path"  # its path
REGION = "_smp_region"  # its Region, and more of it
INSIDE_REGION = "_smp_inside_region"  # of a region: the planned path, and `Place`s by path
HELD = "_smp_held"  # the Slices of its parameters, by name
CHOSEN_OUTPUTS = "_smp_chosen_outputs"  # of a linear: the size of a unit, and the units chosen
BY_ROWS = "_smp_cut_by_rows"  # of a leaf: its weight is to be cut by rows
REPLACES = "_smp_replaces"  # the `BothWays` of the module that it replaces
COMPARED_CALLS = "_smp_compared_calls"  # the calls with samples compared by the tp_ranks

# Attributes of a parameter or buffer of a split model.  A parameter's deep copy lacks them; all
# other copies and pickles have them.  ``smp/slicing/parameter_marks.py`` keeps those of a cut
# through conversions.  End: the tensor's.
SLICES = "_smp_slices"  # this rank's part; None: all of it
SCALED_BATCH = "_smp_scaled_batch"  # it sees the samples of the whole TP_GROUP
OF_SPLIT_MODEL = "_smp_of_split_model"  # some parameter of its model is cut
PARTIAL_GRADIENT = "_smp_partial_gradient"  # see ``smp/tensor_parallel/backward/gradients.py``
PATH_OF_PARAMETER = "_smp_path"  # its path, of one cut in place
SCALES = "_smp_scales"  # its gradients' factor; None: its module's
GATHERS = "_smp_gathers"  # how often the script has gathered it
REPLACED = "_smp_replaced"  # its name in the model before a distributed module took the place

# In the __dict__ of a half parameter: optimizers update its float32 master weight.  Deep copies
# lack it.  End: the tensor's.
HAS_MASTER = "_smp_has_master"

# In the __dict__ of a sharded parameter: its `smp.sharding.shards.Shard`.  Deep copies lack it.
# End: the tensor's, or a conversion.
SHARD = "_smp_shard"

# An attribute of a parameter or buffer of another rank: path and pp_rank.  A parameter refuses
# copies and pickles; those of a buffer are plain tensors.  End: the tensor's.
HOME = "_smp_home"

# An attribute of a view of a gathered parameter: its `SplitTensor`.  End: the view's.
PART = "_smp_part"

# Attributes of stand-in classes, and so not of copies.  End: none, as of the classes.
USERS_CLASS = "_smp_users_class"  # the class written by the user
ORIGINAL_CLASS = "_smp_original_class"  # the class before the partition
CHECKPOINTED = "_smp_checkpointed"  # the class without activation checkpointing
SET_ELSEWHERE = "_smp_set_elsewhere"  # names of attributes set on other ranks
REFUSES_COPIES = "_smp_refuses_copies"  # a method: raises the reason for no copies and pickles
WRAPPED = "_smp_wrapped"  # a slot of ``model.module.module``: the wrapped module

# The same of a class with recorded instances: its ``__init__`` records.  End: none.
RECORDS = "_smp_records"

# An attribute of a function for ``module._apply`` that waits for delayed values.  End: its.
CONVERTS = "_smp_converts"

# In the __dict__ of a Hugging Face cache.  Copies have them.  End: the cache's.
HAS_PADDING = "_smp_has_padding"
FILLED_BY = "_smp_filled_by"  # paths of attentions

# In the __dict__ of an exception from another rank: its description.  End: the exception's.
TOLD = "_smp_told"

# A key of partial state dicts, also in files.
IS_PARTIAL = "_smp_is_partial"

# A key of partial state dicts of sharded optimizers, also in files.
IS_SHARD = "_smp_is_shard"

# In the __dict__ of a `smp.DistributedModel`: the wrapped module.
WRAPPED_MODULE = "_smp_module"


def is_mark(name: str) -> bool:
    """Whether an attribute's name is one of smp's."""
    return name.startswith("_smp_")


def set_class(thing: Any, cls: type) -> None:
    """Have an object be of another class; the object's own ``__setattr__`` may hand this on.

    Modules get stand-in classes (``smp/modules/stand_ins.py``), for good but for those of
    activation checkpointing; copies and pickles are of the user's class.  Replacements get a
    forward with the arguments of the replaced module.  Parameters and buffers get the classes
    of split parameters (``smp/slicing/split_parameters.py``) and of tensors of other ranks
    (``smp/modules/remote_tensors.py``), for good but for conversions.  Sharded ones have one
    while they are released, or have averages (``smp/sharding/shards.py``).
    """
    thing.__class__ = cls


def set_class_itself(thing: object, cls: Any) -> None:
    """Likewise, past the ``__setattr__`` of forwarding classes, as of torch.compile's."""
    object.__setattr__(thing, "__class__", cls)
