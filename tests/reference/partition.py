"""A plain partition: docs/partition.md by recursion, and by trying every cut.

``csrc/partition`` decides the same without recursion and without trying.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate

UNITS = 1 << 40  # of a model
INHERIT, NONE = -1, -2  # pins that are no device


@dataclass
class Tree:
    """A model: module i is a child of module ``parent[i]``, and 0 is the root.

    Attributes:
        parameter: bytes of the one parameter that each module owns; 0: it owns none.
        uses: (module, owner of a parameter that it uses as well).
        first_run: position of the first execution; -1: it never ran.
        chain: whether it only hands one child's output to the next.
        pin: a device, INHERIT or NONE.
        default: the device of what is not pinned; -1: it is decided.
    """

    parent: list[int]
    parameter: list[int]
    uses: list[tuple[int, int]]
    first_run: list[int]
    activation: list[int]
    seconds: list[float]
    chain: list[bool]
    pin: list[int]
    default: int = -1


@dataclass(eq=False)
class Node:
    """Modules that share a parameter, directly or by way of others.

    Attributes:
        own: its units, with those of what rides with it.
        free: units of the subtree that are not pinned.
        capacity: most devices of use to the subtree.
        host: the node that it rides with, for want of parameters.
    """

    modules: list[int]
    pin: int = NONE
    chain: bool = False
    children: list["Node"] = field(default_factory=list)
    run: float = float("inf")
    parameters: bool = False  # in the subtree, as pins
    pins: bool = False
    own: int = 0
    free: int = 0
    capacity: int = 0
    host: "Node | None" = None
    device: int = -1


@dataclass
class Division:
    """A row cut into segments, row[cut[s]:cut[s + 1]], with a number of devices each.

    Attributes:
        cost: of each segment, with what counts of the load of its device.
        capacity: most devices of use to it.
    """

    cut: list[int]
    cost: list[int]
    capacity: list[int]
    seats: list[int]
    spare: int  # devices that no segment can use


def partition(tree: Tree, devices: int, memory_weight: float) -> list[int]:
    """The device of each module.  Pins may not contradict a shared parameter."""
    units = costs(tree, memory_weight)
    nodes = join(tree)
    for node in nodes:
        node.own = sum(units[module] for module in node.modules)
    load = [0] * devices
    ride(nodes[0], nodes[0])
    settle(nodes[0], tree.default, load, is_root=True)
    place(nodes[0], 0, devices, load)
    device = {m: (node.host or node).device for node in nodes for m in node.modules}
    return [device[module] for module in range(len(tree.parent))]


def costs(tree: Tree, memory_weight: float) -> list[int]:
    """C(m) = alpha w(m) + (1 - alpha) psi(m), each of them a share, in whole units."""
    bytes_ = sum(tree.activation) + sum(tree.parameter)
    seconds = sum(tree.seconds)
    out = []
    for activation, parameter, time in zip(
        tree.activation, tree.parameter, tree.seconds, strict=True
    ):
        psi = time / seconds if seconds else 1 / len(tree.parent)
        shares = [(1 - memory_weight) * psi]
        if bytes_:
            shares += [memory_weight * (activation / bytes_)]
            shares += [memory_weight * (parameter / bytes_)]
        out.append(sum(int(share * UNITS + 0.5) for share in shares))
    return out


# ------------------------------------------------------------------------------- the tree


def join(tree: Tree) -> list[Node]:
    """The nodes, the root's first; each below the nearest to the root that holds it."""
    number = range(len(tree.parent))
    label = list(number)
    for module, owner in tree.uses:
        old, new = label[module], label[owner]
        label = [new if one == old else one for one in label]
    pin = list(tree.pin)
    for module in number:
        if pin[module] == INHERIT:
            pin[module] = pin[tree.parent[module]] if module else NONE
    owns = [parameter > 0 for parameter in tree.parameter]

    def node_of(module: int) -> Node:
        modules = [m for m in number if label[m] == label[module]]
        return Node(
            modules,
            pin=max(pin[m] for m in modules),
            chain=len(modules) == 1 and tree.chain[module],
            parameters=any(owns[m] for m in modules),
        )

    nodes = [node_of(0)]
    met = set(nodes[0].modules)
    for node in nodes:
        for child in [c for m in node.modules for c in number if c and tree.parent[c] == m]:
            if child not in met:
                node.children.append(node_of(child))
                met |= set(node.children[-1].modules)
        nodes += node.children
    for node in reversed(nodes):
        runs = [tree.first_run[m] for m in node.modules if tree.first_run[m] >= 0]
        node.run = min([*runs, *(child.run for child in node.children)], default=node.run)
        node.children.sort(key=lambda child: child.run)
        node.capacity = int(node.parameters and node.pin < 0)
        node.capacity += sum(child.capacity for child in node.children)
        node.parameters |= any(child.parameters for child in node.children)
        node.pins = node.pin >= 0 or any(child.pins for child in node.children)
    return nodes


def ride(node: Node, host: Node) -> None:
    """What holds no parameter runs with its parent, in a chain with the child before."""
    for child in node.children:
        if child.parameters or child.pins:
            ride(child, child)
            host = child if node.chain else host
        else:
            child.host = host
            host.own += child.own
            ride(child, host)


def settle(node: Node, default: int, load: list[int], is_root: bool = False) -> None:
    """What is pinned, a container of pinned modules too; the load that it makes."""
    for child in node.children:
        settle(child, default, load)
    if node.host is not None:
        return
    if default >= 0:
        node.capacity = 0
    node.device = node.pin if node.pin >= 0 else default
    if node.device < 0 and node.capacity == 0 and not is_root:
        node.device = next(c.device for c in node.children if c.host is None and c.device >= 0)
    node.free = sum(child.free for child in node.children)
    if node.device >= 0:
        load[node.device] += node.own
    else:
        node.free += node.own


# ----------------------------------------------------------------------------- its devices


def place(node: Node, first: int, devices: int, load: list[int]) -> None:
    """The node is on the first of its devices, which it divides among its children."""
    pinned = node.device >= 0
    if not pinned:
        node.device = first
    row = [child for child in node.children if child.host is None and child.capacity]
    if devices == 1:  # whose load has the whole node already
        for child in row:
            place(child, first, 1, load)
        return
    if not pinned:
        load[first] += node.own
    given: list[tuple[Node, int, int]] = []
    if row:
        divide(row, first, devices, True, node.chain, load, given)
    for child, at, seats in given:
        place(child, at, seats, load)


def divide(
    row: list[Node],
    first: int,
    devices: int,
    front: bool,
    chain: bool,
    load: list[int],
    given: list[tuple[Node, int, int]],
) -> None:
    """Give each node of the row its devices; ``front``: the first one's load counts."""

    def give(nodes: list[Node], at: int, seats: int) -> None:
        for node in nodes:
            seats = min(seats, node.capacity)
            given.append((node, at, seats))
            load[at] += node.free if seats == 1 else 0

    rest = sum(node.free for node in row)
    beside = at = first
    while front and devices > 1 and rest and load[at]:  # has it its share already?
        if load[at] * devices < load[at] + rest:
            break
        at, devices = at + 1, devices - 1
    if devices == 1:
        give(row, at, 1)
        return
    before = [load[at] if front else 0, *load[at + 1 : at + devices]]
    division = choose(row, before, devices)
    if division.spare and before[0] and division.cut[1]:
        at += 1  # nobody needs the first one
    again = []
    for (begin, end), seats in zip(pairs(division.cut), division.seats, strict=True):
        nodes = row[begin:end]
        if seats == 0:
            give(nodes, beside, 1)
            continue
        if len(nodes) == 1 or seats == 1:
            give(nodes, at, seats)
        else:
            again.append((nodes, at, seats))
        if chain:  # where the input of the next comes from
            beside = at if len(nodes) == 1 else at + seats - 1
        at += seats
    for nodes, at, seats in again:
        divide(nodes, at, seats, len(nodes) < len(row), chain, load, given)


def choose(row: list[Node], before: list[int], devices: int) -> Division:
    """By highest averages, unless the first device gets over 8/7 of what it must."""
    shared = cut_and_share(row, before, devices)
    if all(seats == 1 for seats in shared.seats):
        return shared
    shared = cut_and_share(row, before[:1], devices)  # whose the others are is open
    level = greatest_load(shared)
    least = max(
        (before[0] + sum(node.free for node in row)) // devices,
        *(node.free // node.capacity for node in row),
        before[0],
    )
    if level - level // 8 <= least:
        return shared
    cut, seats = pack([(node.free, node.capacity) for node in row], before[0], devices)
    packed = weigh(row, before[:1], devices, cut)
    share(packed, devices, seats)
    if len(packed.seats) == 1 or greatest_load(packed) > level - level // 8:
        return shared
    return packed


def greatest_load(division: Division) -> int:
    """The first device has all that got none."""
    rows = list(zip(division.cost, division.seats, strict=True))
    loads = [cost // seats for cost, seats in rows if seats]
    if loads:
        loads[0] += sum(cost for cost, seats in rows if not seats)
    return max(loads, default=0)


def cut_and_share(row: list[Node], before: list[int], devices: int) -> Division:
    cut = list(range(len(row) + 1))
    if len(row) >= devices:
        preload = before + [0] * (devices - len(before))
        cut = segment([node.free for node in row], preload)
    out = weigh(row, before, devices, cut)
    share(out, devices, [0] * len(out.cost))
    return out


def weigh(row: list[Node], before: list[int], devices: int, cut: list[int]) -> Division:
    cost, capacity = [], []
    for s, (begin, end) in enumerate(pairs(cut)):
        nodes = row[begin:end]
        cost.append(sum(node.free for node in nodes) + (before[s] if s < len(before) else 0))
        capacity.append(min(devices, sum(node.capacity for node in nodes) if nodes else 1))
    return Division(cut, cost, capacity, [], 0)


def share(division: Division, devices: int, seats: list[int]) -> None:
    """D'Hondt: each device to the largest cost / (devices it has + 1), the first one."""
    left = devices - sum(seats)
    while left:
        wanting = [
            (-Fraction(cost, has + 1), s)
            for s, (cost, has) in enumerate(zip(division.cost, seats, strict=True))
            if cost and has < division.capacity[s]
        ]
        if not wanting:
            break
        seats[min(wanting)[1]] += 1
        left -= 1
    division.seats, division.spare = seats, left


# ------------------------------------------------------------------------------- of numbers


def pairs(cut: list[int]) -> list[tuple[int, int]]:
    return list(zip(cut, cut[1:], strict=False))


def segment(items: list[int], preload: list[int]) -> list[int]:
    """The cut whose greatest segment is least; of these, each near the mean of the rest.

    A segment is empty only where it has a preload, or there are too few items.
    """
    prefix = [0, *accumulate(items)]
    empty = len(items) < preload.count(0)

    def ends(s: int, begin: int, bound: int) -> list[int]:
        """Where segment s may end, so that the others find room."""
        least = begin + (not empty and preload[s] == 0)
        if s == len(preload) - 1:
            fits = least <= len(items) and preload[s] + prefix[-1] - prefix[begin] <= bound
            return [len(items)] if fits else []
        return [
            end
            for end in range(least, len(items) + 1)
            if preload[s] + prefix[end] - prefix[begin] <= bound and ends(s + 1, end, bound)
        ]

    loads = {
        load + prefix[end] - prefix[begin]
        for load in {*preload}
        for begin in range(len(prefix))
        for end in range(begin, len(prefix))
    }
    bound = min(load for load in loads if load >= max(preload) and ends(0, 0, load))
    cut = [0]
    for s in range(len(preload) - 1):
        rest = prefix[-1] - prefix[cut[s]] + sum(preload[s:])
        goal = prefix[cut[s]] + rest // (len(preload) - s) - preload[s]
        cut.append(min(ends(s, cut[s], bound), key=lambda end: (abs(prefix[end] - goal), end)))
    return [*cut, len(items)]


def pack(row: list[tuple[int, int]], front: int, devices: int) -> tuple[list[int], list[int]]:
    """Each device full before the next begins, to the least level at which all fit."""
    low, high = max(front, 1), max(front + sum(cost for cost, _ in row), 1)
    while low < high:
        middle = (low + high) // 2
        if fill(row, front, devices, middle) is None:
            low = middle + 1
        else:
            high = middle
    packed = fill(row, front, devices, low)
    assert packed is not None
    return packed


def fill(
    row: list[tuple[int, int]], front: int, devices: int, level: int
) -> tuple[list[int], list[int]] | None:
    """Cuts and devices of the segments; None: there are too few devices."""
    load, cut, seats = front, [0], [1]
    for i, (cost, capacity) in enumerate(row):
        if load + cost <= level:
            load += cost
            continue
        needed = -(-(load + cost) // level)
        if cost > level > load and needed <= capacity:  # divided, from this device on
            seats[-1] += needed - 1
            load = level
        else:
            needed = -(-cost // level)
            if needed > capacity:
                return None
            cut.append(i)
            seats.append(needed)
            load = level if needed > 1 else cost
        if sum(seats) > devices:
            return None
    return [*cut, len(row)], seats
