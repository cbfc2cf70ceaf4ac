/* Norm, scale and clamp over many tensors at once, on the CPU.
 *
 * Tensors are read through the DLPack exchange table that torch.Tensor carries (`__dlpack_c_exchange_api__`), a
 * stable C layout: no torch header is needed, and one build (CPython's limited API) serves every torch and Python.
 *
 * How it is right
 *   - Sums of float, half and bfloat16 go on in double after at most sixteen terms. A chunk whose sum leaves the
 *     range of float is added again in double, where none of their squares overflows or vanishes; double itself
 *     (and any p but 1, 2 and infinity) is added again scaled by its largest value where the sum cannot be trusted.
 *   - Sums run over fixed lanes and fixed chunks, so the answer does not depend on the number of threads.
 *   - A tensor that cannot be described as one dense block of a known type makes the call return None: the caller
 *     then uses torch for it. Nothing has been written at that point.
 */
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifndef _WIN32
#include <pthread.h>
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

/* The vector loops are compiled for three generations of x86 and the best is picked when the library is loaded. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORISED
#endif

/* ---- the part of DLPack 1.x that is used ------------------------------------------------------------------- */

typedef struct {
  void *data;
  struct { int32_t type, id; } device;
  int32_t ndim;
  struct { uint8_t code, bits; uint16_t lanes; } dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} DLTensor;

typedef struct {
  struct { uint32_t major, minor; } version;
  void *prev_api;
  void *managed_tensor_allocator, *managed_tensor_from_py_object, *managed_tensor_to_py_object;
  int (*dltensor_from_py_object)(void *py_object, DLTensor *out);
} DLExchange;

enum { DL_CPU = 1, DL_FLOAT = 2, DL_BFLOAT = 4 };

static const DLExchange *exchange = NULL;
static PyObject *tensor_type = NULL, *parameter_type = NULL; /* subclasses may be anything: they are torch's */

/* ---- one dense block of memory per tensor, cut into chunks ------------------------------------------------- */

typedef enum { F32, F64, F16, BF16 } Type;
typedef struct { char *data; int64_t n; Type type; } Span;
typedef struct { int64_t span, start, n; } Chunk;
typedef struct { Span *spans; int64_t n_spans; Chunk *chunks; int64_t n_chunks; int64_t n_elements; } Work;

enum { STREAMS = 4, WIDTH = 16, LANES = STREAMS * WIDTH, FLUSH = 16, BLOCK = LANES * FLUSH, CHUNK = 32 * BLOCK };
static const int SIZE[] = {4, 8, 2, 2};

static void work_free(Work *w) { free(w->spans); free(w->chunks); }

/* Dense: the strides are those of some order of the dimensions, without gaps and without overlap. */
static int is_dense(const DLTensor *t) {
  if (t->ndim > 64) return 0;
  uint64_t used = 0;
  int64_t expected = 1;
  for (int round = 0; round < t->ndim; round++) { /* find the dimension that continues the block so far */
    int next = -1;
    for (int d = 0; d < t->ndim && next < 0; d++)
      if (!(used >> d & 1) && (t->shape[d] == 1 || t->strides[d] == expected)) next = d;
    if (next < 0) return 0;
    used |= (uint64_t)1 << next;
    expected *= t->shape[next];
  }
  return 1;
}

static int describe(PyObject *object, Span *out) {
  DLTensor t;
  PyObject *type = (PyObject *)Py_TYPE(object);
  if (type != tensor_type && type != parameter_type) return 0;
  if (exchange->dltensor_from_py_object(object, &t) != 0) {
    PyErr_Clear();
    return 0;
  }
  if (t.device.type != DL_CPU || t.dtype.lanes != 1) return 0;
  if (t.dtype.code == DL_FLOAT && t.dtype.bits == 32) out->type = F32;
  else if (t.dtype.code == DL_FLOAT && t.dtype.bits == 64) out->type = F64;
  else if (t.dtype.code == DL_FLOAT && t.dtype.bits == 16) out->type = F16;
  else if (t.dtype.code == DL_BFLOAT && t.dtype.bits == 16) out->type = BF16;
  else return 0;
  out->n = 1;
  for (int d = 0; d < t.ndim; d++) out->n *= t.shape[d];
  out->data = (char *)t.data + t.byte_offset;
  if (out->n && !t.data) return 0;
  return out->n <= 1 || t.strides == NULL || is_dense(&t);
}

/* 1: ready; 0: something here is not ours to handle; -1: a Python error is set. */
static int work_make(PyObject *tensors, Work *w) {
  memset(w, 0, sizeof *w);
  if (!PyList_Check(tensors)) { PyErr_SetString(PyExc_TypeError, "a list of tensors is expected"); return -1; }
  w->n_spans = (int64_t)PyList_Size(tensors);
  w->spans = malloc((size_t)(w->n_spans + 1) * sizeof *w->spans);
  if (!w->spans) { PyErr_NoMemory(); return -1; }
  for (int64_t i = 0; i < w->n_spans; i++) {
    if (!describe(PyList_GetItem(tensors, i), &w->spans[i])) { work_free(w); return 0; }
    w->n_chunks += (w->spans[i].n + CHUNK - 1) / CHUNK;
    w->n_elements += w->spans[i].n;
  }
  w->chunks = malloc((size_t)(w->n_chunks + 1) * sizeof *w->chunks);
  if (!w->chunks) { work_free(w); PyErr_NoMemory(); return -1; }
  Chunk *c = w->chunks;
  for (int64_t i = 0; i < w->n_spans; i++)
    for (int64_t start = 0; start < w->spans[i].n; start += CHUNK) {
      int64_t left = w->spans[i].n - start;
      *c++ = (Chunk){i, start, left < CHUNK ? left : CHUNK};
    }
  return 1;
}

/* A few megabytes are not worth a second thread: on a machine with other things to do, waiting for it takes longer. */
static int threads_for(const Work *w, int threads) { return w->n_elements <= 32 * CHUNK ? 1 : threads; }

/* ---- threads ----------------------------------------------------------------------------------------------- */

/* torch's CPU build brings the same OpenMP runtime under the same name, so these are torch's own threads, awake from the
 * backward pass, and none beside them to fight over the cores. */
typedef void (*Task)(void *context, int64_t chunk);

static int forked = 0; /* the runtime's threads do not follow into a forked process, which would wait for them for ever */

static void parallel(Task task, void *context, int64_t n, int threads) {
  int team = forked ? 1 : threads;
  int64_t grain = n / (8 * (int64_t)team);
  grain = grain < 1 ? 1 : grain > 64 ? 64 : grain;
#pragma omp parallel for num_threads(team) schedule(dynamic, grain) if (team > 1)
  for (int64_t c = 0; c < n; c++) task(context, c);
}

#ifdef _WIN32
static void survive_fork(void) {}
#else
static void note_fork(void) { forked = 1; }
static void survive_fork(void) { pthread_atfork(NULL, NULL, note_fork); }
#endif

/* ---- half and bfloat16 to float and back ------------------------------------------------------------------- */

static inline float bits_to_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t float_to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

VECTORISED static void widen_bf16(const uint16_t *x, float *y, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = bits_to_float((uint32_t)x[i] << 16);
}

static inline uint16_t float_to_bf16(float f) { /* to nearest, ties to even */
  uint32_t u = float_to_bits(f), rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

VECTORISED static void narrow_bf16(const float *x, uint16_t *y, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = float_to_bf16(x[i]);
}

static float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 1023u;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)mantissa * 0x1p-24f;
  return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

static uint16_t float_to_half(float f) {
  uint32_t u = float_to_bits(f), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);                          /* 65520 and above: infinite */
  if (a < 0x38800000u) return (uint16_t)(sign | (uint32_t)lrintf(bits_to_float(a) * 0x1p24f)); /* subnormal */
  return (uint16_t)(sign | (a - 0x38000000u + 0xfffu + (a >> 13 & 1u)) >> 13);
}

static void widen_f16_plain(const uint16_t *x, float *y, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = half_to_float(x[i]);
}

static void narrow_f16_plain(const float *x, uint16_t *y, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = float_to_half(x[i]);
}

static void (*widen_f16)(const uint16_t *, float *, int64_t) = widen_f16_plain;
static void (*narrow_f16)(const float *, uint16_t *, int64_t) = narrow_f16_plain;

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("avx,f16c"))) static void widen_f16_f16c(const uint16_t *x, float *y, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
  widen_f16_plain(x + i, y + i, n - i);
}

__attribute__((target("avx,f16c"))) static void narrow_f16_f16c(const float *x, uint16_t *y, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i *)(y + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
  narrow_f16_plain(x + i, y + i, n - i);
}
#endif

static void choose_half_conversion(int plain) {
  widen_f16 = widen_f16_plain;
  narrow_f16 = narrow_f16_plain;
#if defined(__x86_64__) && defined(__GNUC__)
  if (!plain && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx")) {
    widen_f16 = widen_f16_f16c;
    narrow_f16 = narrow_f16_f16c;
  }
#else
  (void)plain;
#endif
}

/* A block of a narrow type as floats; floats themselves are not moved. */
static const float *floats(const Span *s, int64_t start, int64_t n, float *buffer) {
  const char *at = s->data + start * SIZE[s->type];
  if (s->type == F32) return (const float *)at;
  (s->type == BF16 ? widen_bf16 : widen_f16)((const uint16_t *)at, buffer, n);
  return buffer;
}

/* ---- sums over one run of memory --------------------------------------------------------------------------- */

/* Halves onto each other: one after the other would take as long as a thousand elements do. Changes the lanes. */
static double add_lanes(double *lane) {
  for (int half = LANES / 2; half; half /= 2)
    for (int j = 0; j < half; j++) lane[j] += lane[j + half];
  return lane[0];
}

#define AT_F32(x, i) (x)[i]
#define AT_BF16(x, i) bits_to_float((uint32_t)(x)[i] << 16)
#define SQUARE(v) ((v) * (v))

/* Every lane adds at most FLUSH terms in float before they go on in double; the rest is added in double. What left
 * the range of float on the way is seen in the result, and measured again by the caller.
 *
 * The run is read as LANES / W runs side by side, W values of each in turn: a core that follows four at once has more
 * of memory under way, and read floats a sixth faster than with one. Bfloat16, with half the bytes, gained nothing. */
#define DEFINE_SUM(NAME, T, AT, TERM, W)                                                   \
  VECTORISED static double NAME(const T *x, int64_t n) {                                   \
    double total[LANES] = {0};                                                             \
    int64_t each = n / LANES * W, i = 0;                                                   \
    while (i < each) {                                                                     \
      float lane[LANES] = {0};                                                             \
      int64_t end = each - i < W * FLUSH ? each : i + W * FLUSH;                           \
      for (; i < end; i += W)                                                              \
        for (int s = 0; s < LANES / W; s++)                                                \
          for (int j = 0; j < W; j++) lane[s * W + j] += TERM(AT(x, s * each + i + j));    \
      for (int j = 0; j < LANES; j++) total[j] += (double)lane[j];                         \
    }                                                                                      \
    i = LANES / W * each;                                                                  \
    for (int j = 0; i < n; i++, j++) total[j] += TERM((double)AT(x, i));                   \
    return add_lanes(total);                                                               \
  }

DEFINE_SUM(sum_squares_f32, float, AT_F32, SQUARE, 16)
DEFINE_SUM(sum_squares_bf16, uint16_t, AT_BF16, SQUARE, 64)
DEFINE_SUM(sum_abs_f32, float, AT_F32, fabs, 16)
DEFINE_SUM(sum_abs_bf16, uint16_t, AT_BF16, fabs, 64)

/* The largest magnitude by its bits: NaN lies above infinity there, so it is never lost. */
#define DEFINE_MAX(NAME, T, BITS, MAGNITUDE)                                               \
  VECTORISED static BITS NAME(const T *x, int64_t n) {                                     \
    BITS lane[LANES] = {0}, top = 0;                                                       \
    int64_t each = n / LANES * WIDTH;                                                      \
    for (int64_t i = 0; i < each; i += WIDTH)                                              \
      for (int s = 0; s < STREAMS; s++)                                                    \
        for (int j = 0; j < WIDTH; j++) {                                                  \
          BITS u = MAGNITUDE(x[s * each + i + j]);                                         \
          lane[s * WIDTH + j] = u > lane[s * WIDTH + j] ? u : lane[s * WIDTH + j];         \
        }                                                                                  \
    for (int64_t i = STREAMS * each; i < n; i++) top = MAGNITUDE(x[i]) > top ? MAGNITUDE(x[i]) : top; \
    for (int j = 0; j < LANES; j++) top = lane[j] > top ? lane[j] : top;                   \
    return top;                                                                            \
  }

static inline uint64_t double_to_bits(double d) { uint64_t u; memcpy(&u, &d, 8); return u; }
static inline double bits_to_double(uint64_t u) { double d; memcpy(&d, &u, 8); return d; }

#define MAGNITUDE_F32(v) (float_to_bits(v) & 0x7fffffffu)
#define MAGNITUDE_BF16(v) (uint16_t)((v) & 0x7fffu)
#define MAGNITUDE_F64(v) (double_to_bits(v) & 0x7fffffffffffffffu)

DEFINE_MAX(max_bits_f32, float, uint32_t, MAGNITUDE_F32)
DEFINE_MAX(max_bits_bf16, uint16_t, uint16_t, MAGNITUDE_BF16)
DEFINE_MAX(max_bits_f64, double, uint64_t, MAGNITUDE_F64)

/* a^p for the p people use without calling pow: halves and small whole numbers. */
static inline double power(double a, double p) {
  if (p == 2) return a * a;
  if (p == 1) return a;
  if (p == 3) return a * a * a;
  if (p == 4) return (a * a) * (a * a);
  if (p == 0.5) return sqrt(a);
  return pow(a, p);
}

VECTORISED static double sum_powers_f64(const double *x, int64_t n, double p, double scale) {
  double lane[LANES] = {0};
  int64_t i = 0;
  if (p == 2)
    for (; i + LANES <= n; i += LANES)
      for (int j = 0; j < LANES; j++) lane[j] += (x[i + j] * scale) * (x[i + j] * scale);
  else if (p == 1)
    for (; i + LANES <= n; i += LANES)
      for (int j = 0; j < LANES; j++) lane[j] += fabs(x[i + j] * scale);
  for (int j = 0; i < n; i++, j = (j + 1) % LANES) lane[j] += power(fabs(x[i] * scale), p);
  return add_lanes(lane);
}

VECTORISED static void widen_f32(const float *x, double *y, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = (double)x[i];
}

static double larger(double a, double b) { return isnan(a) || a > b ? a : b; } /* NaN wins */

/* Sum of |scale x|^p, in double throughout: any p, any type. */
static double measure_wide(const Span *s, int64_t start, int64_t n, double p, double scale) {
  float narrow[BLOCK];
  double wide[BLOCK], total = 0;
  if (s->type == F64) return sum_powers_f64((const double *)s->data + start, n, p, scale);
  for (int64_t at = 0; at < n; at += BLOCK) {
    int64_t m = n - at < BLOCK ? n - at : BLOCK;
    widen_f32(floats(s, start + at, m, narrow), wide, m);
    total += sum_powers_f64(wide, m, p, scale);
  }
  return total;
}

static double largest(const Span *s, int64_t start, int64_t n) {
  char *at = s->data + start * SIZE[s->type];
  if (s->type == F64) return bits_to_double(max_bits_f64((const double *)at, n));
  if (s->type == F32) return bits_to_float(max_bits_f32((const float *)at, n));
  uint16_t top = max_bits_bf16((const uint16_t *)at, n); /* half has its sign in the same place */
  return s->type == F16 ? half_to_float(top) : bits_to_float((uint32_t)top << 16);
}

static double sum_f16(const uint16_t *x, int64_t n, double p) {
  float block[BLOCK];
  double total = 0;
  for (int64_t at = 0; at < n; at += BLOCK) {
    int64_t m = n - at < BLOCK ? n - at : BLOCK;
    widen_f16(x + at, block, m);
    total += p == 2 ? sum_squares_f32(block, m) : sum_abs_f32(block, m);
  }
  return total;
}

/* Sum of |x|^p over one chunk (the largest |x| where p is infinite). */
static double measure_chunk(const Work *w, const Chunk *c, double p) {
  const Span *s = &w->spans[c->span];
  char *at = s->data + c->start * SIZE[s->type];
  double sum;
  if (isinf(p)) return largest(s, c->start, c->n);
  if (s->type == F64 || (p != 1 && p != 2)) return measure_wide(s, c->start, c->n, p, 1);
  if (s->type == F32) sum = p == 2 ? sum_squares_f32((float *)at, c->n) : sum_abs_f32((float *)at, c->n);
  else if (s->type == BF16) sum = p == 2 ? sum_squares_bf16((uint16_t *)at, c->n) : sum_abs_bf16((uint16_t *)at, c->n);
  else sum = sum_f16((uint16_t *)at, c->n, p);
  return sum > 1e-25 && sum < 1e37 ? sum : measure_wide(s, c->start, c->n, p, 1); /* out of the range of float */
}

/* ---- norms ------------------------------------------------------------------------------------------------- */

static double finish(double sum, double p) {
  return isinf(p) || p == 1 ? sum : p == 2 ? sqrt(sum) : pow(sum, 1 / p);
}

/* Where the largest value is so small that no double holds the power of two that brings it to 1. */
static double sum_tiny(const double *x, int64_t n, double p, int exponent) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += power(fabs(ldexp(x[i], -exponent)), p);
  return sum;
}

static double scaled_norm(const Work *w, int64_t first, int64_t last, double p) {
  double top = 0, sum = 0;
  int exponent;
  for (int64_t c = first; c < last; c++) top = larger(measure_chunk(w, &w->chunks[c], INFINITY), top);
  if (top == 0 || !isfinite(top)) return top;
  frexp(top, &exponent); /* a power of two scales without rounding */
  for (int64_t c = first; c < last; c++) {
    const Chunk *k = &w->chunks[c];
    const Span *s = &w->spans[k->span];
    sum += exponent < -1000 ? sum_tiny((const double *)s->data + k->start, k->n, p, exponent)
                            : measure_wide(s, k->start, k->n, p, ldexp(1, -exponent));
  }
  return ldexp(finish(sum, p), exponent);
}

/* One norm per tensor from its chunks; `scaled_norm` again where the plain sum cannot be trusted. */
static void norms_from_chunks(const Work *w, const double *partial, double p, double *norm) {
  int64_t c = 0;
  for (int64_t i = 0; i < w->n_spans; i++) {
    int64_t first = c;
    double sum = 0;
    for (; c < w->n_chunks && w->chunks[c].span == i; c++) sum = isinf(p) ? larger(partial[c], sum) : sum + partial[c];
    int safe = isinf(p) || isnan(sum) || (sum > 1e-280 && sum < 1e300);
    norm[i] = safe || c == first ? finish(sum, p) : scaled_norm(w, first, c, p);
  }
}

static double norm_of_norms(const double *norm, int64_t n, double p) {
  double top = 0, sum = 0;
  for (int64_t i = 0; i < n; i++) top = larger(norm[i], top);
  if (isinf(p) || top == 0 || !isfinite(top)) return top;
  for (int64_t i = 0; i < n; i++) sum += power(norm[i] / top, p);
  return finish(sum, p) * top;
}

typedef struct { const Work *work; double p, *partial; } Measuring;

static void measure_task(void *context, int64_t c) {
  const Measuring *m = context;
  m->partial[c] = measure_chunk(m->work, &m->work->chunks[c], m->p);
}

static void measure(const Work *w, double p, int threads, double *partial, double *norm) {
  Measuring m = {w, p, partial};
  parallel(measure_task, &m, w->n_chunks, threads_for(w, threads));
  norms_from_chunks(w, partial, p, norm);
}

/* ---- scale and clamp --------------------------------------------------------------------------------------- */

typedef enum { SCALE, CLAMP } Change;

#define TO_F32(v) (v)

#define DEFINE_SCALE(NAME, T, BY, AT, TO)                                                  \
  VECTORISED static void NAME(T *x, int64_t n, BY by) {                                    \
    for (int64_t i = 0; i < n; i++) x[i] = TO(AT(x, i) * by);                              \
  }

DEFINE_SCALE(scale_f32, float, float, AT_F32, TO_F32)
DEFINE_SCALE(scale_f32_wide, float, double, AT_F32, (float))
DEFINE_SCALE(scale_f64, double, double, AT_F32, TO_F32)
DEFINE_SCALE(scale_bf16, uint16_t, float, AT_BF16, float_to_bf16)

/* Comparisons are false for NaN, which so stays what it is; written as the processor's own minimum and maximum do it. */
#define DEFINE_CLAMP(NAME, T)                                                              \
  VECTORISED static void NAME(T *x, int64_t n, T by) {                                     \
    for (int64_t i = 0; i < n; i++) {                                                      \
      T below = by < x[i] ? by : x[i];                                                     \
      x[i] = -by > below ? -by : below;                                                    \
    }                                                                                      \
  }

DEFINE_CLAMP(clamp_f32, float)
DEFINE_CLAMP(clamp_f64, double)

/* Half types by their bits: a magnitude above the limit's but not above infinity's (which would be NaN) is replaced,
 * and the sign kept. */
VECTORISED static void clamp_bits16(uint16_t *x, int64_t n, uint16_t limit, uint16_t infinity) {
  for (int64_t i = 0; i < n; i++) {
    uint16_t size = x[i] & 0x7fffu;
    x[i] = size > limit && size <= infinity ? (uint16_t)((x[i] & 0x8000u) | limit) : x[i];
  }
}

/* A coefficient that no normal float holds is applied in double, so that what it yields is still right. */
static int needs_double(double by) { return by != 0 && (fabs(by) < 0x1p-126 || fabs(by) > 0x1.fffffep127); }

static void scale_any_f32(float *x, int64_t n, double by) {
  if (needs_double(by)) scale_f32_wide(x, n, by);
  else scale_f32(x, n, (float)by);
}

static void scale_half(const Span *s, uint16_t *x, int64_t n, double by) {
  float block[BLOCK];
  for (int64_t at = 0; at < n; at += BLOCK) {
    int64_t m = n - at < BLOCK ? n - at : BLOCK;
    (s->type == BF16 ? widen_bf16 : widen_f16)(x + at, block, m);
    scale_any_f32(block, m, by);
    (s->type == BF16 ? narrow_bf16 : narrow_f16)(block, x + at, m);
  }
}

static void scale_chunk(const Span *s, int64_t start, int64_t n, double by) {
  char *at = s->data + start * SIZE[s->type];
  if (s->type == F64) scale_f64((double *)at, n, by);
  else if (s->type == F32) scale_any_f32((float *)at, n, by);
  else if (s->type == F16 || needs_double(by)) scale_half(s, (uint16_t *)at, n, by);
  else scale_bf16((uint16_t *)at, n, (float)by);
}

static int is_over(const Span *s, int64_t start, int64_t n, double by) {
  return !(largest(s, start, n) <= (s->type == F64 ? by : (double)(float)by)); /* NaN is: it is then looked at, and stays */
}

/* The largest finite value of each type. A larger limit than that still holds for infinite elements. */
static const double LARGEST[] = {0x1.fffffep127, 0x1.fffffffffffffp1023, 65504, 0x1.fep127};

/* Written only where something is over the limit: what was read to find out is in the cache, and memory is spared the
 * write. Where the first block is over it, the others mostly are, and are not read twice. */
static void clamp_chunk(const Span *s, int64_t start, int64_t n, double by) {
  char *x = s->data + start * SIZE[s->type];
  if (by < INFINITY && by > LARGEST[s->type]) by = LARGEST[s->type];
  if (!is_over(s, start, n < BLOCK ? n : BLOCK, by) && !is_over(s, start, n, by)) return;
  if (s->type == F64) clamp_f64((double *)x, n, by);
  else if (s->type == F32) clamp_f32((float *)x, n, (float)by);
  else if (s->type == BF16) clamp_bits16((uint16_t *)x, n, float_to_bf16((float)by), 0x7f80);
  else clamp_bits16((uint16_t *)x, n, float_to_half((float)by), 0x7c00);
}

typedef struct { const Work *work; Change change; const double *by; int one_for_all; } Changing;

static void change_task(void *context, int64_t k) {
  const Changing *t = context;
  const Work *w = t->work;
  const Chunk *c = &w->chunks[w->n_chunks - 1 - k]; /* backwards: what the norm read last is still in the cache */
  double by = t->one_for_all ? *t->by : t->by[c->span];
  if (t->change == CLAMP) clamp_chunk(&w->spans[c->span], c->start, c->n, by);
  else if (by != 1) scale_chunk(&w->spans[c->span], c->start, c->n, by);
}

/* ---- the displacement of parameters from their average ------------------------------------------------------- */

enum { PRODUCTS = 5, SUM_LANES = 4 };

typedef struct { const Work *work; const float *place, *grad; float *average, share; double *sums; } Following;

VECTORISED static void displace(const float *restrict place, float *restrict average, float *restrict way, int64_t n, float share) {
  for (int64_t i = 0; i < n; i++) way[i] = place[i] - average[i], average[i] += share * way[i];
}

VECTORISED static void add_products(const float *way, const float *place, const float *g, int64_t n, double *sums) {
  double s[PRODUCTS][SUM_LANES] = {{0}};
  for (int64_t i = 0; i < n; i += SUM_LANES)
    for (int j = 0; j < SUM_LANES && i + j < n; j++) {
      double w = way[i + j], p = place[i + j], d = g[i + j];
      s[0][j] += w * w, s[1][j] += w * p, s[2][j] += p * p, s[3][j] += w * d, s[4][j] += p * d;
    }
  for (int k = 0; k < PRODUCTS; k++)
    for (int j = 0; j < SUM_LANES; j++) sums[k] += s[k][j];
}

static void follow_task(void *context, int64_t k) {
  const Following *f = context;
  const Chunk *c = &f->work->chunks[k];
  float way[BLOCK];
  for (int64_t at = c->start, end = c->start + c->n; at < end; at += BLOCK) {
    int64_t m = end - at < BLOCK ? end - at : BLOCK;
    displace(f->place + at, f->average + at, way, m, f->share);
    add_products(way, f->place + at, f->grad + at, m, f->sums + PRODUCTS * k);
  }
}

/* ---- Python ------------------------------------------------------------------------------------------------ */

static PyObject *py_connect(PyObject *self, PyObject *args) {
  PyObject *tensor, *parameter, *capsule;
  (void)self;
  if (!PyArg_ParseTuple(args, "OOO", &tensor, &parameter, &capsule)) return NULL;
  const DLExchange *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (!api) return NULL;
  if (api->version.major != 1) Py_RETURN_FALSE;
  Py_INCREF(tensor);
  Py_INCREF(parameter);
  tensor_type = tensor, parameter_type = parameter;
  exchange = api;
  Py_RETURN_TRUE;
}

/* A one-dimensional float64 tensor of exactly n values, or an error. */
static double *doubles(PyObject *tensor, int64_t n) {
  Span s;
  static double nothing; /* an empty tensor has no address */
  if (describe(tensor, &s) && s.type == F64 && s.n == n) return n ? (double *)s.data : &nothing;
  PyErr_Format(PyExc_ValueError, "a float64 CPU tensor of %lld values is expected", (long long)n);
  return NULL;
}

static PyObject *py_norm(PyObject *self, PyObject *args) {
  PyObject *tensors, *each = Py_None;
  double p, total;
  int threads;
  Work w;
  (void)self;
  if (!PyArg_ParseTuple(args, "Odi|O", &tensors, &p, &threads, &each)) return NULL;
  int ready = work_make(tensors, &w);
  if (ready < 0) return NULL;
  if (!ready) Py_RETURN_NONE;
  double *norm = NULL, *own = malloc((size_t)(w.n_spans + w.n_chunks + 1) * sizeof *own);
  if (!own) PyErr_NoMemory();
  else norm = each == Py_None ? own : doubles(each, w.n_spans);
  if (!norm) { free(own); work_free(&w); return NULL; }
  Py_BEGIN_ALLOW_THREADS
  measure(&w, p, threads, own + w.n_spans, norm);
  total = norm_of_norms(norm, w.n_spans, p);
  Py_END_ALLOW_THREADS
  int any_double = 0;
  for (int64_t i = 0; i < w.n_spans && !any_double; i++) any_double = w.spans[i].type == F64;
  free(own);
  work_free(&w);
  return Py_BuildValue("(dO)", total, any_double ? Py_True : Py_False);
}

static PyObject *change(PyObject *tensors, PyObject *by, Change what, int threads) {
  Work w;
  double one = 0;
  const double *many = NULL;
  int ready = work_make(tensors, &w);
  if (ready < 0) return NULL;
  if (!ready) Py_RETURN_FALSE;
  if (PyFloat_Check(by)) one = PyFloat_AsDouble(by);
  else many = doubles(by, w.n_spans);
  if (PyErr_Occurred()) { work_free(&w); return NULL; }
  Py_BEGIN_ALLOW_THREADS
  Changing t = {&w, what, many ? many : &one, !many};
  parallel(change_task, &t, w.n_chunks, threads_for(&w, threads));
  Py_END_ALLOW_THREADS
  work_free(&w);
  Py_RETURN_TRUE;
}

static PyObject *py_scale(PyObject *self, PyObject *args) {
  PyObject *tensors, *by;
  int threads;
  (void)self;
  return PyArg_ParseTuple(args, "OOi", &tensors, &by, &threads) ? change(tensors, by, SCALE, threads) : NULL;
}

static PyObject *py_clamp(PyObject *self, PyObject *args) {
  PyObject *tensors, *by;
  int threads;
  (void)self;
  return PyArg_ParseTuple(args, "OOi", &tensors, &by, &threads) ? change(tensors, by, CLAMP, threads) : NULL;
}

/* Vectors of float32: parameters, gradients, and the average, which takes a share of the displacement. */
static PyObject *py_follow(PyObject *self, PyObject *args) {
  PyObject *vectors;
  double share, total[PRODUCTS] = {0};
  int threads;
  Work w;
  (void)self;
  if (!PyArg_ParseTuple(args, "Odi", &vectors, &share, &threads)) return NULL;
  int ready = work_make(vectors, &w), ours = ready > 0 && w.n_spans == 3;
  if (ready < 0) return NULL;
  for (int i = 0; ours && i < 3; i++) ours = w.spans[i].type == F32 && w.spans[i].n == w.spans[0].n;
  double *sums = ours ? calloc((size_t)(PRODUCTS * w.n_chunks + 1), sizeof *sums) : NULL;
  if (ours && sums) {
    Py_BEGIN_ALLOW_THREADS
    Following f = {&w, (float *)w.spans[0].data, (float *)w.spans[1].data, (float *)w.spans[2].data, (float)share, sums};
    parallel(follow_task, &f, w.n_chunks / 3, threads_for(&w, threads));
    for (int64_t i = 0; i < PRODUCTS * w.n_chunks; i++) total[i % PRODUCTS] += sums[i];
    Py_END_ALLOW_THREADS
    free(sums);
  }
  if (ready > 0) work_free(&w);
  if (!ours) Py_RETURN_NONE;
  return sums ? Py_BuildValue("(ddddd)", total[0], total[1], total[2], total[3], total[4]) : PyErr_NoMemory();
}

static PyObject *py_is_dense(PyObject *self, PyObject *tensor) {
  Span s;
  (void)self;
  return PyBool_FromLong(describe(tensor, &s));
}

static PyObject *py_plain(PyObject *self, PyObject *flag) {
  (void)self;
  choose_half_conversion(PyObject_IsTrue(flag));
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"connect", py_connect, METH_VARARGS, "connect(Tensor, Parameter, capsule) -> bool: take torch's DLPack exchange table"},
    {"norm", py_norm, METH_VARARGS, 
     "norm(tensors, p, threads, each=None) -> (total, is any float64), or None: not ours to measure"},
    {"scale", py_scale, METH_VARARGS, "scale(tensors, coefficient(s), threads) -> bool: False, nothing was done"},
    {"clamp", py_clamp, METH_VARARGS, "clamp(tensors, limit(s), threads) -> bool: False, nothing was done"},
    {"follow", py_follow, METH_VARARGS, "follow([parameters, grads, average], share, threads) -> five products, or None"},
    {"is_dense", py_is_dense, METH_O, "is_dense(tensor) -> bool: would the kernels take it?"},
    {"plain", py_plain, METH_O, "plain(bool): for tests, without what was written for one kind of processor"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_cpu", "Multi-tensor norm, scale and clamp on the CPU.", -1, methods, NULL, NULL,
    NULL, NULL};

PyMODINIT_FUNC PyInit__cpu(void) {
  choose_half_conversion(0);
  survive_fork();
  return PyModule_Create(&module);
}
