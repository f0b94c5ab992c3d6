"""One vector times a matrix, in compiled C: the product that generation at batch 1 is made of.

It reads every weight once and is bound by that, where torch's libraries read one row's weights at
half to three quarters of a core's speed, and bfloat16 at a quarter. What matters is that a core
reads few streams without a break: each takes its rows in order, one stream in the upper and one in
the lower half of the matrix. Rows taken in groups of four or eight break the streams at every
group, and short blocks of columns more often still.

Every entry of the result is summed by one thread in an order that depends on K alone: numbers do
not change with the count of threads, with addresses or with the other rows of the matrix.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from groundlm import compiled
from groundlm.model import products

KINDS = {torch.float32: "float", torch.bfloat16: "bf16"}
"""C names of the dtypes that weights may have."""

SMALLEST = {torch.float32: 1 << 19, torch.bfloat16: 1 << 10}
"""Elements of a weight below which torch's lower cost per call outweighs its slower reading."""

SOURCE = r"""
#include <string.h>
typedef long I;
enum { LANES = 16, STEP = 2 * LANES, LARGE = 1 << 17 };
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef unsigned Bits __attribute__((vector_size(4 * LANES)));
typedef struct { Lanes first, second; } Pair; /* STEP weights or STEP numbers of x */
typedef float float_weight;
typedef unsigned short bf16_weight; /* the upper half of a float */

static inline Lanes lanes(const float *p) {
  Lanes a;
  memcpy(&a, p, sizeof a); /* from any address */
  return a;
}
static inline Pair pair_float(const float *p) {
  Pair a = {lanes(p), lanes(p + LANES)};
  return a;
}
/* Numbers of even index come first: they are the lower halves of the words. */
static inline Pair pair_bf16(const bf16_weight *p) {
  Bits words;
  memcpy(&words, p, sizeof words);
  Pair a = {(Lanes)(words << 16), (Lanes)(words & 0xffff0000u)};
  return a;
}
static inline float number_float(float w) { return w; }
static inline float number_bf16(bf16_weight w) {
  unsigned bits = (unsigned)w << 16;
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}
/* x in the order in which `pair` gives the weights. */
static const float *order_float(const float *x, float *room, I K) { return x; }
static const float *order_bf16(const float *x, float *room, I K) {
  memcpy(room, x, K * sizeof(float));
  for (I k = 0; k + STEP <= K; k += STEP)
    for (I i = 0; i < LANES; i++) {
      room[k + i] = x[k + 2 * i];
      room[k + LANES + i] = x[k + 2 * i + 1];
    }
  return room;
}
static inline float total(Pair sum) {
  Lanes both = sum.first + sum.second;
  float s[LANES];
  memcpy(s, &both, sizeof s);
  for (I half = LANES / 2; half; half /= 2)
    for (I i = 0; i < half; i++) s[i] += s[i + half];
  return s[0];
}
"""

TEMPLATE = r"""
static inline void add_KIND(Pair *sum, const KIND_weight *w, Pair x) {
  Pair a = pair_KIND(w);
  sum->first += a.first * x.first;
  sum->second += a.second * x.second;
}
static inline float rest_KIND(Pair sum, const KIND_weight *w, const float *x, I k, I K) {
  float s = total(sum);
  for (; k < K; k++) s += number_KIND(w[k]) * x[k];
  return s;
}
/* y_n = weight_n . x and y_m = weight_m . x for two rows of the matrix. */
static void dots_KIND(const KIND_weight *wn, const KIND_weight *wm, const float *x, float *yn,
                      float *ym, I K) {
  Pair n = {{0}, {0}}, m = n;
  I k = 0;
  for (; k + STEP <= K; k += STEP) {
    Pair xk = pair_float(x + k);
    add_KIND(&n, wn + k, xk);
    add_KIND(&m, wm + k, xk);
  }
  *yn = rest_KIND(n, wn, x, k, K);
  *ym = rest_KIND(m, wm, x, k, K);
}
/* y [N] = weight [N, K] x [K]; `room` holds K numbers. */
void product_KIND(const KIND_weight *weight, const float *x, float *y, float *room, I N, I K) {
  const float *ordered = order_KIND(x, room, K);
  I half = (N + 1) / 2, lower = N - half; /* of an odd N the middle row is taken twice */
#pragma omp parallel for schedule(static) if (N * K >= LARGE)
  for (I n = 0; n < half; n++)
    dots_KIND(weight + n * K, weight + (lower + n) * K, ordered, y + n, y + lower + n, K);
}
"""


def applies(x: Tensor, weight_NK: Tensor) -> bool:
    """Whether `row_product` takes this product: one row of float32, no gradient, worth a call.

    float32 weights on Intel's processors stay with MKL, which reads at the memory's speed there.
    """
    return (
        not torch.is_grad_enabled()
        and weight_NK.numel() >= SMALLEST.get(weight_NK.dtype, math.inf)
        and x.numel() == weight_NK.shape[-1]
        and x.dtype is torch.float32
        and weight_NK.is_cpu
        and weight_NK.is_contiguous()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and _function(weight_NK.dtype) is not None
    )


def row_product(x: Tensor, weight_NK: Tensor) -> Tensor:
    """`x @ weight.T` for x [..., K] of one row: [..., N], where `applies` says so.

    x and the result are float32, the weights float32 or bfloat16; sums run in float32, so bfloat16
    weights meet an x that is not rounded.
    """
    return _operator(x, weight_NK)


def _row_product(x: Tensor, weight_NK: Tensor) -> Tensor:
    rows, width = weight_NK.shape
    x, y = x.contiguous(), x.new_empty(*x.shape[:-1], rows)
    room = x if weight_NK.dtype is torch.float32 else torch.empty_like(x)
    function = _function(weight_NK.dtype)
    assert function is not None
    function(weight_NK.data_ptr(), x.data_ptr(), y.data_ptr(), room.data_ptr(), rows, width)
    return y


@functools.cache
def _function(dtype: torch.dtype) -> Callable[..., None] | None:
    """The C function for weights of one dtype; None where torch does its products."""
    if not compiled.allowed() or (dtype is torch.float32 and products.made_by_intel()):
        return None
    text = SOURCE + "".join(TEMPLATE.replace("KIND", kind) for kind in KINDS.values())
    library = compiled.load(text, "generation at batch 1")
    if library is None:
        return None
    function = library[f"product_{KINDS[dtype]}"]
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 2
    function.restype = None
    return function


# An operator of torch's own, so that wrapped tensors (vmap, fake tensors) get past it.
_library = torch.library.Library("groundlm", "DEF")
_library.define("row_product(Tensor x, Tensor weight_NK) -> Tensor")
_library.impl("row_product", _row_product, "CPU")
_library.impl("row_product", lambda x, w: x.new_empty(*x.shape[:-1], w.shape[0]), "Meta")
_operator = torch.ops.groundlm.row_product.default
