"""C text of the per-token work between the products; `native` compiles and calls it.

One function per gap between two products, for float or double; rows of the batch run in parallel
on torch's own OpenMP threads. The maths is that of `fused_forward` and `fused_backward`, which stay
the readable version and the fallback.
"""

from functools import cache

HEADER = r"""
#include <math.h>
#include <string.h>
typedef long I;
/* exp for |x| <= 87 in single precision (Cephes), written so that the compiler vectorises it. */
static inline float exp_float(float x) {
  x = x > 87.0f ? 87.0f : x;
  x = x < -87.0f ? -87.0f : x;
  float n = rintf(x * 1.44269504088896341f);
  float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  union { float f; int i; } power;
  power.i = ((int)n + 127) << 23;
  return p * power.f;
}
static inline double exp_double(double x) { return exp(x); }
"""

TEMPLATE = r"""
typedef struct {
  I batch, state, ffn, heads, key, value, reads, chunk;
  REAL eps;
} Dims_REAL;
typedef struct {
  I width, sigmoids_width, first, count, write;
  I gate, beta, decay, read_columns, value_columns;
  REAL *into, *normed, *scale, *inner, *sigmoids, *read_scale, *unit_scale;
} Layer_REAL;
typedef struct {
  REAL *rows, *reads, *factors, *answers, *keys, *log_decay, *rate;
} Memory_REAL;
typedef struct {
  I count;
  REAL *scores, *answer_grads, *overlaps, *write_grads, *key_grads, *key, *recalled, *decay;
} Reverse_REAL;

static REAL dot_REAL(const REAL *a, const REAL *b, I n) {
  REAL sum = 0;
#pragma omp simd reduction(+ : sum)
  for (I i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}
/* out_i = x . row_i over `count` rows of `width` numbers. */
static void dots_REAL(REAL *restrict out, const REAL *restrict rows, const REAL *restrict x,
                      I count, I width) {
  I i = 0;
  for (; i + 4 <= count; i += 4) {
    const REAL *a = rows + i * width, *b = a + width, *c = b + width, *d = c + width;
    REAL sa = 0, sb = 0, sc = 0, sd = 0;
#pragma omp simd reduction(+ : sa, sb, sc, sd)
    for (I v = 0; v < width; v++) {
      REAL xv = x[v];
      sa += a[v] * xv;
      sb += b[v] * xv;
      sc += c[v] * xv;
      sd += d[v] * xv;
    }
    out[i] = sa;
    out[i + 1] = sb;
    out[i + 2] = sc;
    out[i + 3] = sd;
  }
  for (; i < count; i++) out[i] = dot_REAL(rows + i * width, x, width);
}
/* The same, but only where `mask` is not 0 (no gradient passes a ReLU elsewhere); 0 there. */
static void used_dots_REAL(REAL *restrict out, const REAL *restrict rows, const REAL *restrict x,
                           const REAL *mask, I count, I width) {
  I used[count + 4], n = 0;
  for (I k = 0; k < count; k++) {
    used[n] = k;
    n += mask[k] != 0;
    out[k] = 0;
  }
  for (I i = 0; i < n; i += 4) {
    /* The last group is filled up with its first row. */
    I p = used[i], q = i + 1 < n ? used[i + 1] : p, r = i + 2 < n ? used[i + 2] : p;
    I s = i + 3 < n ? used[i + 3] : p;
    const REAL *a = rows + p * width, *b = rows + q * width, *c = rows + r * width;
    const REAL *d = rows + s * width;
    REAL sa = 0, sb = 0, sc = 0, sd = 0;
#pragma omp simd reduction(+ : sa, sb, sc, sd)
    for (I v = 0; v < width; v++) {
      REAL xv = x[v];
      sa += a[v] * xv;
      sb += b[v] * xv;
      sc += c[v] * xv;
      sd += d[v] * xv;
    }
    out[s] = sd;
    out[r] = sc;
    out[q] = sb;
    out[p] = sa;
  }
}
static void add_scaled_REAL(REAL *y, REAL c, const REAL *x, I n) {
  for (I i = 0; i < n; i++) y[i] += c * x[i];
}
/* y = sum of c_i x_i over `count` rows of `width` numbers, `stride` apart. */
static void mix_REAL(REAL *restrict y, const REAL *c, const REAL *restrict x, I count, I width,
                     I stride) {
  I i = 0;
  for (; i + 4 <= count; i += 4) {
    const REAL *a = x + i * stride, *b = a + stride, *d = b + stride, *e = d + stride;
    REAL ca = c[i], cb = c[i + 1], cd = c[i + 2], ce = c[i + 3];
    for (I v = 0; v < width; v++) y[v] += ca * a[v] + cb * b[v] + cd * d[v] + ce * e[v];
  }
  for (; i < count; i++) add_scaled_REAL(y, c[i], x + i * stride, width);
}
/* The same for two sums at once. A ReLU made the coefficients: rows with two zeros are left out. */
static void mix2_REAL(REAL *restrict y, REAL *restrict z, const REAL *c, const REAL *g,
                      const REAL *restrict x, I count, I width) {
  I used[count + 1], n = 0, i = 0;
  for (I k = 0; k < count; k++) {
    used[n] = k;
    n += c[k] != 0 || g[k] != 0;
  }
  for (; i + 4 <= n; i += 4) {
    I p = used[i], q = used[i + 1], r = used[i + 2], s = used[i + 3];
    const REAL *a = x + p * width, *b = x + q * width, *d = x + r * width, *e = x + s * width;
    REAL ca = c[p], cb = c[q], cd = c[r], ce = c[s];
    REAL ga = g[p], gb = g[q], gd = g[r], ge = g[s];
    for (I v = 0; v < width; v++) {
      REAL av = a[v], bv = b[v], dv = d[v], ev = e[v];
      y[v] += ca * av + cb * bv + cd * dv + ce * ev;
      z[v] += ga * av + gb * bv + gd * dv + ge * ev;
    }
  }
  for (; i < n; i++) {
    add_scaled_REAL(y, c[used[i]], x + used[i] * width, width);
    add_scaled_REAL(z, g[used[i]], x + used[i] * width, width);
  }
}
static void normalise_row_REAL(const REAL *x, REAL *normed, REAL *scale, I n, REAL eps) {
  REAL s = 1 / SQRT(dot_REAL(x, x, n) / n + eps);
  *scale = s;
  for (I i = 0; i < n; i++) normed[i] = x[i] * s;
}

void normalise_REAL(const Dims_REAL *d, const REAL *x, REAL *normed, REAL *scale) {
#pragma omp parallel for schedule(static) if (d->batch > 1)
  for (I b = 0; b < d->batch; b++)
    normalise_row_REAL(x + b * d->state, normed + b * d->state, scale + b, d->state, d->eps);
}

/* gate = sigmoid(z), y = token + gate * before, and y / rms(y). */
void ground_REAL(const Dims_REAL *d, const REAL *z, const REAL *token, I token_stride,
                 const REAL *before, REAL *gate, REAL *y, REAL *normed, REAL *scale) {
  I n = d->state;
#pragma omp parallel for schedule(static) if (d->batch > 1)
  for (I b = 0; b < d->batch; b++) {
    const REAL *zb = z + b * n, *eb = token + b * token_stride, *pb = before + b * n;
    REAL *gb = gate + b * n, *yb = y + b * n;
    for (I i = 0; i < n; i++) {
      REAL g = 1 / (1 + exp_REAL(-zb[i]));
      gb[i] = g;
      yb[i] = eb[i] + g * pb[i];
    }
    normalise_row_REAL(yb, normed + b * n, scale + b, n, d->eps);
  }
}

static void write_REAL(const Dims_REAL *d, const Layer_REAL *l, const Memory_REAL *m, I step, I b,
                       REAL *into, const REAL *sigmoids, const REAL *key, I key_stride,
                       const REAL *recalled, I recalled_stride) {
  I K = d->key, V = d->value, C = d->chunk, c = step / C, j = step % C, pairs = d->batch * d->heads;
  for (I h = 0; h < d->heads; h++) {
    I p = b * d->heads + h;
    REAL raw = into[l->decay + h];
    REAL log_decay = m->rate[h] * (raw > 20 ? raw : LOG1P(EXP(raw)));
    REAL a = EXP(log_decay), beta = sigmoids[l->beta - d->ffn + h];
    m->log_decay[(step * d->batch + b) * d->heads + h] = log_decay;
    REAL *f = m->factors + ((c * pairs + p) * C + j) * (C + 1);
    if (j == 0) f[0] = a;
    else for (I i = 0; i <= j; i++) f[i] = f[i - C - 1] * a;
    memcpy(m->keys + (p * C + j) * K, key + p * key_stride, K * sizeof(REAL));
    REAL *w = into + l->value_columns + h * V;
    REAL *u = m->rows + ((c * pairs + p) * (K + C) + K + j) * V;
    const REAL *r = recalled + p * recalled_stride;
    for (I v = 0; v < V; v++) {
      w[v] -= r[v];
      u[v] = beta * w[v];
    }
  }
}

static void read_REAL(const Dims_REAL *d, const Layer_REAL *l, const Memory_REAL *m, I step, I b,
                      REAL *into) {
  I K = d->key, V = d->value, C = d->chunk, R = d->reads, pairs = d->batch * d->heads;
  I c = step / C, j = step % C, n = l->count;
  REAL mixed[2][K + C];
  for (I h = 0; h < d->heads; h++) {
    I p = b * d->heads + h;
    const REAL *f = m->factors + ((c * pairs + p) * C + j) * (C + 1);
    const REAL *rows = m->rows + (c * pairs + p) * (K + C) * V, *keys = m->keys + p * C * K;
    REAL *x = m->reads + ((c * pairs + p) * C * R + j * R + l->first) * K;
    REAL *y = m->answers + ((step * pairs + p) * R + l->first) * V;
    memset(y, 0, n * V * sizeof(REAL));
    for (I r = 0; r < n; r++) {
      REAL *raw = into + l->read_columns + (h * n + r) * K, *xr = x + r * K;
      for (I k = 0; k < K; k++) raw[k] = raw[k] > 0 ? raw[k] : raw[k] * 0;
      REAL s = 1 / SQRT(dot_REAL(raw, raw, K) + (REAL)1e-12);
      l->unit_scale[((step * d->batch + b) * d->heads + h) * n + r] = s;
      for (I k = 0; k < K; k++) {
        xr[k] = raw[k] * s;
        mixed[r][k] = xr[k] * f[0];
      }
      dots_REAL(mixed[r] + K, keys, xr, j + 1, K);
      for (I i = 0; i <= j; i++) mixed[r][K + i] *= f[1 + i];
    }
    if (n == 2) mix2_REAL(y, y + V, mixed[0], mixed[1], rows, K + j + 1, V);
    else mix_REAL(y, mixed[0], rows, K + j + 1, V, V);
  }
}

/* From the first product's result to the second product's input. */
void layer_REAL(const Dims_REAL *d, const Layer_REAL *l, const Memory_REAL *m, I step,
                const REAL *result, const REAL *key, I key_stride, const REAL *recalled,
                I recalled_stride) {
  I F = d->ffn, Y = d->heads * d->value;
#pragma omp parallel for schedule(static) if (d->batch > 1)
  for (I b = 0; b < d->batch; b++) {
    I row = step * d->batch + b;
    REAL *into = l->into + row * l->width, *sigmoids = l->sigmoids + row * l->sigmoids_width;
    REAL *inner = l->inner + row * (F + Y);
    memcpy(into, result + b * l->width, l->width * sizeof(REAL));
    for (I i = 0; i < l->sigmoids_width; i++) sigmoids[i] = 1 / (1 + exp_REAL(-into[F + i]));
    for (I i = 0; i < F; i++) inner[i] = into[F + i] * sigmoids[i] * into[i];
    if (!Y) continue;
    if (l->write)
      write_REAL(d, l, m, step, b, into, sigmoids, key, key_stride, recalled, recalled_stride);
    read_REAL(d, l, m, step, b, into);
    REAL sum = 0;
    I next = d->reads * d->value;
    const REAL *o = m->answers + ((row * d->heads) * d->reads + l->first) * d->value;
    for (I h = 0; h < d->heads; h++) sum += dot_REAL(o + h * next, o + h * next, d->value);
    REAL s = 1 / SQRT(sum / Y + d->eps);
    l->read_scale[row] = s;
    for (I h = 0; h < d->heads; h++)
      for (I v = 0; v < d->value; v++) {
        I i = F + h * d->value + v;
        inner[i] = into[F + i] * sigmoids[i] * s * o[h * next + v];
      }
  }
}

/* out = z + gate * y, and out / rms(out) for what comes next (NULL: nothing does). */
void carry_REAL(const Dims_REAL *d, const Layer_REAL *l, I step, const REAL *z, const REAL *y,
                REAL *out, REAL *normed, REAL *scale) {
  I n = d->state;
#pragma omp parallel for schedule(static) if (d->batch > 1)
  for (I b = 0; b < d->batch; b++) {
    const REAL *gate = l->sigmoids + (step * d->batch + b) * l->sigmoids_width + l->gate - d->ffn;
    REAL *ob = out + b * n;
    for (I i = 0; i < n; i++) ob[i] = z[b * n + i] + gate[i] * y[b * n + i];
    if (normed) normalise_row_REAL(ob, normed + b * n, scale + b, n, d->eps);
  }
}

static void reverse_read_REAL(const Dims_REAL *d, const Layer_REAL *l, const Memory_REAL *m,
                              const Reverse_REAL *g, I step, I b, REAL *into) {
  I K = d->key, V = d->value, C = d->chunk, R = d->reads, pairs = d->batch * d->heads;
  I c = step / C, j = step % C, n = l->count;
  REAL grad[K];
  for (I h = 0; h < d->heads; h++) {
    I p = b * d->heads + h;
    const REAL *f = m->factors + ((c * pairs + p) * C + j) * (C + 1);
    const REAL *rows = m->rows + (c * pairs + p) * (K + C) * V, *keys = m->keys + p * C * K;
    for (I r = 0; r < n; r++) {
      I slot = j * R + l->first + r;
      const REAL *dy = g->answer_grads + (p * g->count * R + slot) * V;
      REAL *overlaps = g->overlaps + (p * g->count * R + slot) * g->count;
      const REAL *x = m->reads + ((c * pairs + p) * C * R + slot) * K;
      used_dots_REAL(grad, rows, dy, x, K, V);
      for (I k = 0; k < K; k++) grad[k] *= f[0];
      dots_REAL(overlaps, rows + K * V, dy, j + 1, V);
      for (I i = 0; i <= j; i++) overlaps[i] *= f[1 + i];
      mix_REAL(grad, overlaps, keys, j + 1, K, K);
      if (r == 1) add_scaled_REAL(grad, 1, g->key + p * K, K);
      REAL along = dot_REAL(grad, x, K);
      REAL s = l->unit_scale[((step * d->batch + b) * d->heads + h) * n + r];
      REAL *raw = into + l->read_columns + (h * n + r) * K;
      for (I k = 0; k < K; k++) raw[k] = raw[k] > 0 ? (grad[k] - x[k] * along) * s : raw[k] * 0;
    }
  }
}

static void reverse_write_REAL(const Dims_REAL *d, const Layer_REAL *l, const Memory_REAL *m,
                               const Reverse_REAL *g, I step, I b, REAL *into,
                               const REAL *sigmoids) {
  I K = d->key, V = d->value, C = d->chunk, R = d->reads, pairs = d->batch * d->heads;
  I c = step / C, j = step % C, n = g->count, later = (n - j) * R;
  for (I h = 0; h < d->heads; h++) {
    I p = b * d->heads + h;
    const REAL *dy = g->answer_grads + (p * n * R + j * R) * V;
    REAL *du = g->write_grads + (p * n + j) * V, *w = into + l->value_columns + h * V;
    mix_REAL(du, g->scores + (p * n + j) * n * R + j * R, dy, later, V, V);
    REAL beta = sigmoids[l->beta - d->ffn + h], beta_grad = dot_REAL(du, w, V);
    REAL decay_grad = g->decay[p] - beta * beta_grad;
    decay_grad += dot_REAL(dy, m->answers + (step * pairs + p) * R * V, R * V);
    into[l->beta + h] = beta_grad * beta * (1 - beta);
    into[l->decay + h] = decay_grad * m->rate[h] * sigmoids[l->decay - d->ffn + h];
    m->log_decay[(step * d->batch + b) * d->heads + h] *= decay_grad;
    g->decay[p] = decay_grad;
    for (I v = 0; v < V; v++) {
      w[v] = beta * du[v];
      g->recalled[p * V + v] = -w[v];
    }
    REAL *key = g->key + p * K;
    memcpy(key, g->key_grads + (p * n + j) * K, K * sizeof(REAL));
    const REAL *x = m->reads + ((c * pairs + p) * C * R + j * R) * K;
    REAL column[later];
    for (I i = 0; i < later; i++) column[i] = g->overlaps[(p * n * R + j * R + i) * n + j];
    mix_REAL(key, column, x, later, K, K);
  }
}

/* From the second product's input gradient to the gradient of the first product's result. */
void reverse_layer_REAL(const Dims_REAL *d, const Layer_REAL *l, const Memory_REAL *m,
                        const Reverse_REAL *g, I step, const REAL *grad, const REAL *inner,
                        REAL *direct) {
  I F = d->ffn, V = d->value, Y = d->heads * V, n = d->state, R = d->reads, j = step % d->chunk;
#pragma omp parallel for schedule(static) if (d->batch > 1)
  for (I b = 0; b < d->batch; b++) {
    I row = step * d->batch + b;
    REAL *into = l->into + row * l->width, *sigmoids = l->sigmoids + row * l->sigmoids_width;
    const REAL *ib = inner + b * (F + Y);
    for (I i = 0; i < F; i++) {
      REAL s = sigmoids[i], swish = into[F + i] * s;
      REAL slope = (s + swish * (1 - s)) * into[i];
      into[i] = ib[i] * swish;
      into[F + i] = ib[i] * slope;
    }
    REAL *gate = sigmoids + l->gate - F, *into_gate = into + l->gate;
    const REAL *normed = l->normed + row * n;
    REAL inverse = 1 / l->scale[row];
    for (I i = 0; i < n; i++) {
      REAL s = gate[i], dy = grad[b * n + i];
      into_gate[i] = dy * s * (1 - s) * normed[i] * inverse;
      direct[b * n + i] = dy * s;
      gate[i] = dy;
    }
    if (!Y) continue;
    REAL scale = l->read_scale[row], sum = 0;
    for (I h = 0; h < d->heads; h++) {
      I p = b * d->heads + h;
      REAL *dy = g->answer_grads + (p * g->count * R + j * R + l->first) * V;
      const REAL *o = m->answers + ((row * d->heads + h) * R + l->first) * V;
#pragma omp simd reduction(+ : sum)
      for (I v = 0; v < V; v++) {
        I i = F + h * V + v;
        REAL s = sigmoids[i], swish = into[F + i] * s, answer = o[v] * scale;
        into[F + i] = ib[i] * answer * (s + swish * (1 - s));
        dy[v] = ib[i] * swish;
        sum += dy[v] * answer;
      }
    }
    sum = sum / Y * scale;
    for (I h = 0; h < d->heads; h++) {
      I p = b * d->heads + h;
      REAL *dy = g->answer_grads + (p * g->count * R + j * R + l->first) * V;
      const REAL *o = m->answers + ((row * d->heads + h) * R + l->first) * V;
      for (I v = 0; v < V; v++) dy[v] = scale * (dy[v] - o[v] * sum);
      if (l->write) memcpy(dy + V, g->recalled + p * V, V * sizeof(REAL));
    }
    reverse_read_REAL(d, l, m, g, step, b, into);
    if (l->write) reverse_write_REAL(d, l, m, g, step, b, into, sigmoids);
  }
}

/* onto += (grad - normed * mean(grad * normed)) * scale + extra (NULL: none). */
static void unnormalise_row_REAL(const REAL *grad, const REAL *normed, REAL scale, REAL *onto,
                                 const REAL *extra, I n) {
  REAL mean = dot_REAL(grad, normed, n) / n;
  for (I i = 0; i < n; i++) onto[i] += (grad[i] - normed[i] * mean) * scale;
  if (extra) for (I i = 0; i < n; i++) onto[i] += extra[i];
}
void unnormalise_REAL(const Dims_REAL *d, const REAL *grad, const REAL *normed, const REAL *scale,
                      REAL *onto, const REAL *extra, I extra_stride) {
  I n = d->state;
#pragma omp parallel for schedule(static) if (d->batch > 1)
  for (I b = 0; b < d->batch; b++)
    unnormalise_row_REAL(grad + b * n, normed + b * n, scale[b], onto + b * n,
                         extra ? extra + b * extra_stride : 0, n);
}

/* As `unnormalise`, then through the ground gate: token_grad, the gate's gradient, direct. */
void reverse_ground_REAL(const Dims_REAL *d, const REAL *grad, const REAL *normed,
                         const REAL *scale, REAL *onto, const REAL *extra, I extra_stride,
                         REAL *token_grad, REAL *gate, const REAL *before_normed,
                         const REAL *before_scale) {
  I n = d->state;
#pragma omp parallel for schedule(static) if (d->batch > 1)
  for (I b = 0; b < d->batch; b++) {
    REAL *ob = onto + b * n, *gb = gate + b * n, inverse = 1 / before_scale[b];
    unnormalise_row_REAL(grad + b * n, normed + b * n, scale[b], ob,
                         extra ? extra + b * extra_stride : 0, n);
    for (I i = 0; i < n; i++) {
      REAL g = gb[i], y = ob[i];
      token_grad[b * n + i] = y;
      gb[i] = y * g * (1 - g) * before_normed[b * n + i] * inverse;
      ob[i] = y * g;
    }
  }
}
"""


@cache
def source(real: str) -> str:
    """The C file for `float` or `double`."""
    math = {"float": ("expf", "log1pf", "sqrtf"), "double": ("exp", "log1p", "sqrt")}
    exp, log1p, sqrt = math[real]
    text = TEMPLATE.replace("LOG1P", log1p).replace("EXP(", exp + "(").replace("SQRT", sqrt)
    return HEADER + text.replace("REAL", real)
