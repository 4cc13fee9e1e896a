"""Which classes have a distributed form that takes their place."""

from smp import not_built

tp_register = not_built.function("smp.tp_register")
tp_register_with_module = not_built.function("smp.tp_register_with_module")
