"""Layers over pages at sizes that the vendor's kernels take, with prompts that fill whole pages."""

from lib.zoo.caches import Nz, Paged
from lib.zoo.mla import Spelling
from lib.zoo.sizes import Sizes

REAL = Sizes(
    hidden=1024, heads=4, nope=128, rope=64, value=128, q_rank=1536, kv_rank=512, context=256, block=128, epsilon=1e-6
)
PAGED = Spelling(cache="paged", norm="fused", attend="eager", sizes=REAL)
KERNELS = ("MlaPrologV3", "FusedInferAttentionScore")


class WholePages(Paged):
    """Prompts that fill pages, which are written by their numbers."""

    is_ragged = False

    def place(self, sizes, step):
        table, first = self.table(sizes, step), step.start // sizes.block
        return table[:, first : first + step.tokens // sizes.block].flatten(), table

    def write(self, cache, rows, place):
        cache[place] = rows.view(len(place), *cache.shape[1:])


class NzWholePages(Nz, WholePages):
    """Prompts that fill pages in FRACTAL_NZ, which are written by their numbers."""

    def store(self, cache, rows, place):
        (blocks, table), width = place, rows.shape[-1]
        nz = self.form(cache, width)
        nz[blocks] = rows.reshape(len(blocks), cache.shape[1], nz.shape[1], nz.shape[3]).transpose(1, 2)
        return None, self.read(nz, table).reshape(rows.shape[0], -1, width)
