"""What a run needs of hardware that is not there: programs compiled for a described device, memory, work and bounds on time.

    settings -> programs -> lowered (`lower`) -> compiled by child processes (`crew`, `worker`) -> numbers (`report`)

Left out on purpose: measured times, and programs that a run compiles besides the largest of each kind.
"""
