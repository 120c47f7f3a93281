"""Plans: calls and their operands, among them joined parts, rotary tables and masks."""

from mla_fx.rewriting.materialize import scaled_by as scaled_by
from mla_fx.rewriting.materialize import tensor as tensor
from mla_fx.rewriting.operands import call_with as call_with
from mla_fx.rewriting.operands import check_is_causal as check_is_causal
from mla_fx.rewriting.operands import counts_from_first as counts_from_first
from mla_fx.rewriting.operands import joined as joined
from mla_fx.rewriting.operands import joined_parts as joined_parts
from mla_fx.rewriting.operands import known_causal as known_causal
from mla_fx.rewriting.operands import lengths as lengths
from mla_fx.rewriting.operands import mask_and_lengths as mask_and_lengths
from mla_fx.rewriting.operands import mask_operands as mask_operands
from mla_fx.rewriting.operands import merged as merged
from mla_fx.rewriting.operands import tables as tables
from mla_fx.rewriting.plan import ByHoisting as ByHoisting
from mla_fx.rewriting.plan import Call as Call
from mla_fx.rewriting.plan import Cast as Cast
from mla_fx.rewriting.plan import Computed as Computed
from mla_fx.rewriting.plan import Expression as Expression
from mla_fx.rewriting.plan import Inlined as Inlined
from mla_fx.rewriting.plan import Replacement as Replacement
from mla_fx.rewriting.plan import ViewOf as ViewOf
from mla_fx.rewriting.plan import first_node as first_node
from mla_fx.rewriting.plan import result as result
from mla_fx.rewriting.plan import times as times
from mla_fx.rewriting.replacement import ATTENTION as ATTENTION
from mla_fx.rewriting.replacement import replacing as replacing
