"""How the attend kernels divide their work among blocks."""

from typing import NamedTuple

from dsv4.ops.kernels.checks import require


class Shape(NamedTuple):
    """Few heads a block, see attend.cu. A block has 8 * nh heads and wd warps besides those that fetch."""

    dim: int
    nh: int  # tiles of 8 heads a block
    wd: int  # warps over dim
    kt: int  # keys a tile
    stages: int  # tiles in flight
    cluster: int  # blocks that share the keys of a token
    clusters: int = 1  # of so many blocks, at most
    fetchers: int = 4  # warps that fetch, 4 or 8
    coded: int = 0  # channels that compact rows have in 8 bits; 0: plain rows

    kernel = "attend.cu", "attend"

    @property
    def heads(self) -> int:
        return 8 * self.nh

    @property
    def threads(self) -> int:
        return 32 * (self.wd + self.fetchers)

    @property
    def own_tiles(self) -> int:
        """Tiles of 16 channels that a block adds up for its cluster."""
        return -(-self.dim // (16 * self.cluster))

    @property
    def left_over(self) -> int:
        """Floats of what clusters leave for the last of them, for each token and group of heads: sums, maxima, weights."""
        each = self.own_tiles * self.nh * 128 + 2 * self.heads
        return self.clusters * self.cluster * each if self.clusters > 1 else 0

    @property
    def shared(self) -> int:
        """Bytes of shared memory; the kernel asserts that they suffice."""
        heads, keys = self.heads, self.stages * self.kt
        logits = self.wd * heads * (self.kt + 4) * 4
        sums = self.cluster * self.own_tiles * self.nh * 512  # in the logits' place
        small = heads * (self.kt + 8) * 2 + self.cluster * heads * 8 + self.dim * 4 + heads * 8 + keys * 4
        return -(-(keys * (2 * self.dim + 16) + max(logits, sums) + small + 8 + keys) // 128) * 128

    @property
    def defines(self) -> tuple[str, ...]:
        names = ("DIM", "NH", "WD", "KT", "STAGES", "CLUSTER", "CLUSTERS", "FETCHING_WARPS", "CODED")
        given = (f"{name}={value}" for name, value in zip(names, self, strict=True))
        return *given, f"SHARED={self.shared}"


class WideShape(NamedTuple):
    """64 heads a block on sm_90a, see attend_heads.cu."""

    kt: int  # keys a tile
    cluster: int  # blocks that share the keys of a token
    clusters: int = 1  # as above
    coded: int = 0  # as above
    stages: int = 2
    dim: int = 512

    kernel = "attend_heads.cu", "attend_heads"
    heads = 64
    threads = 32 * (8 + 8)

    @property
    def left_over(self) -> int:
        """As above."""
        return self.clusters * (self.heads * self.dim + 2 * self.heads * self.cluster) if self.clusters > 1 else 0

    @property
    def shared(self) -> int:
        keys = self.stages * self.kt
        rows = 2 * self.dim * (self.heads + keys) + self.kt * 128 + 2048
        return -(-(rows + keys * 12 + 512 + self.heads * 4 + 8 + keys) // 128) * 128

    @property
    def defines(self) -> tuple[str, ...]:
        names = ("KT", "CLUSTER", "CLUSTERS", "CODED", "STAGES", "DIM")
        given = (f"{name}={value}" for name, value in zip(names, self, strict=True))
        return *given, f"SHARED={self.shared}"


class Share(NamedTuple):
    """A launch, and how many keys a token has that it attends to: whose share a token is, is found out on the device."""

    shape: Shape | WideShape
    least: int = 0
    most: int = 2**31 - 1


FEW_KEYS = 256  # of a token at most: the window and a short context's blocks of 128 tokens
MANY_KEYS = 1500  # from here on one token is worth a cluster for each part of its keys


def plan_for(tokens: int, heads: int, dim: int, keys: int, wide: bool, coded: int = 0) -> tuple[Share, ...]:
    """The launches for a batch whose tokens have up to `keys` keys: enough blocks to fill the GPU when there are few
    tokens, fewer reads of each key when there are many. An H200 runs 7, 15, 30 and 66 clusters of 16, 8, 4 and 2 large
    blocks at once. `wide`: attend_heads.cu can be used. ValueError if the kernels cannot take `dim`."""
    require("attend", dim % 16 == 0 and 16 <= dim <= 512, f"head dim {dim}, the kernel takes multiples of 16 up to 512")
    wd = next(n for n in (8, 4, 2, 1) if dim % (16 * n) == 0)
    work, wide_work = tokens * -(-heads // 8), tokens * -(-heads // WideShape.heads)

    def shape(nh: int, kt: int, cluster: int, stages: int = 1, clusters: int = 1) -> Shape:
        fetchers = 8 if kt == 80 or (coded and nh <= 2) else 4  # many rows at once, or rows that are to be widened
        return Shape(dim, nh, wd, kt, stages, cluster, clusters, fetchers, coded)

    if work <= 16:
        few = shape(1 if work <= 8 else 2, 32 if keys <= FEW_KEYS else 80, 8)
        if keys <= MANY_KEYS:
            return (Share(few),)
        if not wide:
            return (Share(shape(2, 48, 8, stages=2, clusters=3)),)
        many = WideShape(64, 16, max(1, 6 // wide_work), coded=coded)
        return Share(few, most=MANY_KEYS), Share(many, least=MANY_KEYS + 1)
    if keys <= FEW_KEYS and work <= 128:
        return (Share(shape(2, 80, 2)),)
    if work <= 32 and keys <= MANY_KEYS:
        return (Share(shape(2, 80, 4)),)
    if wide:
        cluster = next((n for n, most in ((8, 15), (4, 30), (2, 66)) if wide_work <= most), 1)
        return (Share(WideShape(64, cluster, coded=coded)),)
    return (Share(shape(4, 64, 4 if work <= 128 else 2 if work <= 512 else 1, stages=2)),)
