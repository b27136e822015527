/* Products with packed weights, and the decode step of a model of Llama's shape, for a CPU.
 *
 * A product with a few rows waits for its weights, so they are read once, in few bits, for all rows. L outputs lie side
 * by side, one in each lane of a vector, so that no sum crosses lanes. Inputs are rounded to two bytes each, in blocks of
 * 32: where the processor multiplies bytes (AVX-512 VNNI, L = 16), to a 127th of the largest and a 254th of that; where it
 * multiplies words (AVX2, L = 8), to a 32,767th of the largest; elsewhere (L = 8), and with PLAIN defined, they stay in
 * float32.
 *
 * Packed weights [N, K]: for each L outputs, for each block of 32 inputs:
 *   four bits:  L steps, L lows, and the levels of 8 quads of inputs; two quads share their bytes
 *   eight bits: the levels of 8 quads; the L steps of each block come together after the last one
 * A quad is four inputs that follow each other; its 4 L bytes are [L outputs][4 inputs].
 */

#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 32
#define QUADS (BLOCK / 4)
#define MOST_ROWS 16
#define MOST_THREADS 64

#if defined(__AVX512VNNI__) && defined(__AVX512F__) && defined(__AVX512BW__) && !defined(PLAIN)
#define BYTES 1
#define LANES 16
#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__) && !defined(PLAIN)
#define WORDS 1
#define LANES 8
#else
#define LANES 8
#endif
#if BYTES || WORDS
#include <immintrin.h>
typedef uint16_t scale_t; /* float16, as in the blocks of GGUF */
#else
typedef float scale_t;
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vec_u __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

static inline vec load(const float *p) { return *(const vec_u *)p; }
static inline void store(float *p, vec v) { *(vec_u *)p = v; }
static inline vec spread(float x) { return x - (vec){0}; }

static inline vec pick(ivec where, vec one, vec other) { return (vec)(((ivec)one & where) | ((ivec)other & ~where)); }

static inline scale_t stored(float scale) {
#if BYTES || WORDS
    return _cvtss_sh(scale, _MM_FROUND_TO_NEAREST_INT);
#else
    return scale;
#endif
}

static inline vec scales(const scale_t *p) {
#if BYTES
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif WORDS
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    return load(p);
#endif
}

static inline float total(vec v) {
#if BYTES
    return _mm512_reduce_add_ps((__m512)v);
#elif WORDS
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
#else
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
#endif
}

/* e^x within -87 and 87, to the last bit or two of float32 (Cephes' polynomial). */
static inline vec exp_of(vec x) {
    x = pick(x < -87.0f, spread(-87.0f), x);
    x = pick(x > 87.0f, spread(87.0f), x);
    vec n = x * 1.44269504f + 12582912.0f; /* rounds to a whole number */
    ivec whole = (ivec)n - 0x4b400000;
    n = n - 12582912.0f;
    x = x - n * 0.693359375f - n * -2.12194440e-4f;
    vec y = spread(1.9875691500e-4f);
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    return y * (vec)((whole + 127) << 23);
}

/* ---- packed weights ---- */

typedef struct {
    const uint8_t *weights;
    const float *bias; /* [N] or NULL */
    int32_t outputs, inputs, bits, unused;
} Product;

#define LEVELS_4 (QUADS / 2 * 4 * LANES)
#define LEVELS_8 (QUADS * 4 * LANES)
#define SCALES_4 (2 * LANES * (int)sizeof(scale_t))
#define BLOCK_4 (SCALES_4 + LEVELS_4)
#define LINE 64 /* loads that cross one take twice as long */

/* Bytes of a vector's outputs, in whole lines. */
static int64_t group_bytes(int64_t blocks, int bits) {
    int64_t bytes = blocks * (bits == 4 ? BLOCK_4 : LEVELS_8 + LANES * (int64_t)sizeof(scale_t));
    return (bytes + LINE - 1) / LINE * LINE;
}

int64_t ms_packed_bytes(int64_t outputs, int64_t inputs, int bits) {
    return outputs / LANES * group_bytes(inputs / BLOCK, bits);
}

/* levels [N, K] 0..15, step and low [N, K/32] */
void ms_pack_4(const uint8_t *levels, const float *step, const float *low, int64_t outputs, int64_t inputs, uint8_t *start) {
    int64_t blocks = inputs / BLOCK;
    for (int64_t group = 0; group < outputs / LANES; group++, start += group_bytes(blocks, 4)) {
        uint8_t *to = start;
        for (int64_t b = 0; b < blocks; b++, to += BLOCK_4) {
            scale_t of_block[2 * LANES];
            for (int i = 0; i < LANES; i++) {
                int64_t row = group * LANES + i;
                of_block[i] = stored(step[row * blocks + b]);
                of_block[LANES + i] = stored(low[row * blocks + b]);
                const uint8_t *from = levels + row * inputs + b * BLOCK;
                for (int q = 0; q < QUADS; q += 2)
                    for (int j = 0; j < 4; j++)
                        to[SCALES_4 + (q / 2 * LANES + i) * 4 + j] = from[4 * q + j] | from[4 * q + 4 + j] << 4;
            }
            memcpy(to, of_block, sizeof of_block);
        }
    }
}

/* levels [N, K] -127..127, step [N, K/32] */
void ms_pack_8(const int8_t *levels, const float *step, int64_t outputs, int64_t inputs, uint8_t *start) {
    int64_t blocks = inputs / BLOCK;
    for (int64_t group = 0; group < outputs / LANES; group++, start += group_bytes(blocks, 8))
        for (int64_t b = 0; b < blocks; b++)
            for (int i = 0; i < LANES; i++) {
                int64_t row = group * LANES + i;
                scale_t of_block = stored(step[row * blocks + b]);
                memcpy(start + blocks * LEVELS_8 + (b * LANES + i) * sizeof of_block, &of_block, sizeof of_block);
                for (int k = 0; k < BLOCK; k++)
                    start[b * LEVELS_8 + (k / 4 * LANES + i) * 4 + k % 4] =
                        (uint8_t)(levels[row * inputs + b * BLOCK + k] + 128);
            }
}

/* ---- inputs ---- */

#define FINE 254 /* fine levels in a coarse one */

/* One row of inputs, as products take it: scale (FINE coarse + fine) or scale word, with a scale for each block, or as it
 * is. The words of a quad are those of its inputs 0, 2, 1, 3. */
typedef struct {
#if BYTES
    int8_t *coarse, *fine;
    float *scale;
#elif WORDS
    int16_t *words;
    float *scale;
#else
    const float *values;
#endif
    float *sum; /* of each block */
} Input;

static int64_t input_floats(int64_t inputs) { return inputs / 2 + 2 * (inputs / BLOCK) + LANES; }

#if BYTES
/* Rounds sixteen inputs; returns what their levels stand for, in fine ones. */
static inline __m512i both_levels(__m512 x, float by, int8_t *coarse, int8_t *fine) {
    __m512 scaled = _mm512_mul_ps(x, _mm512_set1_ps(by));
    __m512i whole = _mm512_cvtps_epi32(scaled);
    __m512 rest = _mm512_sub_ps(scaled, _mm512_cvtepi32_ps(whole));
    __m512i part = _mm512_cvtps_epi32(_mm512_mul_ps(rest, _mm512_set1_ps(FINE)));
    _mm_storeu_si128((__m128i *)coarse, _mm512_cvtsepi32_epi8(whole));
    _mm_storeu_si128((__m128i *)fine, _mm512_cvtsepi32_epi8(part));
    return _mm512_add_epi32(_mm512_mullo_epi32(whole, _mm512_set1_epi32(FINE)), part);
}

static inline vec both_sums(__m512i coarse, __m512i fine) {
    return (vec)_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_mullo_epi32(coarse, _mm512_set1_epi32(FINE)), fine));
}
#endif

#if WORDS
static inline __m256 magnitude(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

static inline int32_t sum_of(__m256i v) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}
#endif

/* Rounds x [K] into room of input_floats(K). */
static Input input_of(const float *x, int64_t inputs, float *room) {
    int64_t blocks = inputs / BLOCK;
    Input in;
    in.sum = room;
#if BYTES
    in.scale = room + blocks;
    in.coarse = (int8_t *)(room + 2 * blocks);
    in.fine = in.coarse + inputs;
    for (int64_t b = 0; b < blocks; b++) {
        __m512 one = _mm512_loadu_ps(x + b * BLOCK), other = _mm512_loadu_ps(x + b * BLOCK + LANES);
        float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(one), _mm512_abs_ps(other)));
        float by = most > 0 ? 127.0f / most : 0.0f;
        __m512i first = both_levels(one, by, in.coarse + b * BLOCK, in.fine + b * BLOCK);
        __m512i second = both_levels(other, by, in.coarse + b * BLOCK + LANES, in.fine + b * BLOCK + LANES);
        int broken = _mm512_cmp_ps_mask(one, one, _CMP_UNORD_Q) | _mm512_cmp_ps_mask(other, other, _CMP_UNORD_Q);
        in.scale[b] = broken ? NAN : most / (127.0f * FINE); /* the maximum of a NaN is the other */
        in.sum[b] = in.scale[b] * _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
    }
#elif WORDS
    in.scale = room + blocks;
    in.words = (int16_t *)(room + 2 * blocks);
    for (int64_t b = 0; b < blocks; b++) {
        __m256 part[BLOCK / LANES], broken = _mm256_setzero_ps(), top = _mm256_setzero_ps();
        for (int i = 0; i < BLOCK / LANES; i++) {
            part[i] = _mm256_loadu_ps(x + b * BLOCK + i * LANES);
            broken = _mm256_or_ps(broken, _mm256_cmp_ps(part[i], part[i], _CMP_UNORD_Q));
            top = _mm256_max_ps(top, magnitude(part[i]));
        }
        __m128 half = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
        half = _mm_max_ps(half, _mm_movehl_ps(half, half));
        float most = _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
        __m256 by = _mm256_set1_ps(most > 0 ? 32767.0f / most : 0.0f);
        __m256i sum = _mm256_setzero_si256();
        for (int i = 0; i < BLOCK / LANES; i += 2) {
            __m256i one = _mm256_cvtps_epi32(_mm256_mul_ps(part[i], by));
            __m256i other = _mm256_cvtps_epi32(_mm256_mul_ps(part[i + 1], by));
            sum = _mm256_add_epi32(sum, _mm256_add_epi32(one, other));
            __m256i both = _mm256_packs_epi32(_mm256_shuffle_epi32(one, 0xd8), _mm256_shuffle_epi32(other, 0xd8));
            _mm256_storeu_si256((__m256i *)(in.words + b * BLOCK + i * LANES), _mm256_permute4x64_epi64(both, 0xd8));
        }
        in.scale[b] = _mm256_movemask_ps(broken) ? NAN : most / 32767.0f; /* the maximum of a NaN is the other */
        in.sum[b] = in.scale[b] * sum_of(sum);
    }
#else
    in.values = x;
    for (int64_t b = 0; b < blocks; b++) {
        vec sum = load(x + b * BLOCK);
        for (int i = LANES; i < BLOCK; i += LANES) sum += load(x + b * BLOCK + i);
        in.sum[b] = total(sum);
    }
#endif
    return in;
}

/* ---- products ---- */

/* Asks for the lines that come a little later: a row of short blocks is read no faster than memory answers. */
static inline void ahead(const uint8_t *w, int bytes) {
#if WORDS
    for (int i = 0; i < bytes; i += LINE) __builtin_prefetch(w + 512 + i);
#endif
}

#if !BYTES && !WORDS
/* Adds the products of a quad's bytes with four inputs. */
static inline vec quad_product(const uint8_t *bytes, const float *x, int shift, int mask, vec sum) {
    ivec four;
    memcpy(&four, bytes, sizeof four); /* a lane holds the four bytes of its output */
    for (int j = 0; j < 4; j++) sum += __builtin_convertvector((four >> (8 * j + shift)) & mask, vec) * x[j];
    return sum;
}
#endif

/* A vector of outputs of m rows: out[row][L]. m is a constant wherever this is inlined. */
static inline __attribute__((always_inline)) void lanes_4(const uint8_t *w, const Input *in, int64_t blocks, int m,
                                                            vec *out) {
    for (int r = 0; r < m; r++) out[r] = (vec){0};
    for (int64_t b = 0; b < blocks; b++, w += BLOCK_4) {
        vec step = scales((const scale_t *)w), low = scales((const scale_t *)w + LANES);
        const uint8_t *levels = w + SCALES_4;
        ahead(w, BLOCK_4);
#if BYTES
        __m512i coarse[MOST_ROWS], fine[MOST_ROWS];
        for (int r = 0; r < m; r++) coarse[r] = fine[r] = _mm512_setzero_si512();
        const __m512i mask = _mm512_set1_epi8(15);
        for (int q = 0; q < QUADS / 2; q++) {
            __m512i both = _mm512_loadu_si512(levels + q * 4 * LANES);
            __m512i one = _mm512_and_si512(both, mask), other = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
            for (int r = 0; r < m; r++) {
                const int32_t *x = (const int32_t *)(in[r].coarse + b * BLOCK) + 2 * q;
                const int32_t *y = (const int32_t *)(in[r].fine + b * BLOCK) + 2 * q;
                coarse[r] = _mm512_dpbusd_epi32(coarse[r], one, _mm512_set1_epi32(x[0]));
                fine[r] = _mm512_dpbusd_epi32(fine[r], one, _mm512_set1_epi32(y[0]));
                coarse[r] = _mm512_dpbusd_epi32(coarse[r], other, _mm512_set1_epi32(x[1]));
                fine[r] = _mm512_dpbusd_epi32(fine[r], other, _mm512_set1_epi32(y[1]));
            }
        }
        for (int r = 0; r < m; r++)
            out[r] += both_sums(coarse[r], fine[r]) * (step * in[r].scale[b]) + low * in[r].sum[b];
#elif WORDS
        __m256i sum[MOST_ROWS];
        for (int r = 0; r < m; r++) sum[r] = _mm256_setzero_si256();
        const __m256i mask = _mm256_set1_epi16(15);
        for (int q = 0; q < QUADS / 2; q++) { /* a word holds levels of inputs 0 and 1, or 2 and 3, of both quads */
            __m256i both = _mm256_loadu_si256((const __m256i *)(levels + q * 4 * LANES));
            __m256i even = _mm256_and_si256(both, mask), odd = _mm256_and_si256(_mm256_srli_epi16(both, 8), mask);
            __m256i next = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask), last = _mm256_srli_epi16(both, 12);
            for (int r = 0; r < m; r++) {
                const int32_t *x = (const int32_t *)(in[r].words + b * BLOCK) + 4 * q;
                __m256i one = _mm256_add_epi32(_mm256_madd_epi16(even, _mm256_set1_epi32(x[0])),
                                               _mm256_madd_epi16(odd, _mm256_set1_epi32(x[1])));
                __m256i other = _mm256_add_epi32(_mm256_madd_epi16(next, _mm256_set1_epi32(x[2])),
                                                 _mm256_madd_epi16(last, _mm256_set1_epi32(x[3])));
                sum[r] = _mm256_add_epi32(sum[r], _mm256_add_epi32(one, other));
            }
        }
        for (int r = 0; r < m; r++)
            out[r] += (vec)_mm256_cvtepi32_ps(sum[r]) * (step * in[r].scale[b]) + low * in[r].sum[b];
#else
        for (int r = 0; r < m; r++) {
            vec sum = {0};
            for (int q = 0; q < QUADS / 2; q++) {
                const float *x = in[r].values + b * BLOCK + 8 * q;
                sum = quad_product(levels + q * 4 * LANES, x, 0, 15, sum);
                sum = quad_product(levels + q * 4 * LANES, x + 4, 4, 15, sum);
            }
            out[r] += sum * step + low * in[r].sum[b];
        }
#endif
    }
}

static inline __attribute__((always_inline)) void lanes_8(const uint8_t *w, const Input *in, int64_t blocks, int m,
                                                            vec *out) {
    for (int r = 0; r < m; r++) out[r] = (vec){0};
    const scale_t *steps = (const scale_t *)(w + blocks * LEVELS_8);
    for (int64_t b = 0; b < blocks; b++, w += LEVELS_8) {
        vec step = scales(steps + b * LANES);
        ahead(w, LEVELS_8);
#if BYTES
        __m512i coarse[MOST_ROWS], fine[MOST_ROWS];
        for (int r = 0; r < m; r++) coarse[r] = fine[r] = _mm512_setzero_si512();
        for (int q = 0; q < QUADS; q++) {
            __m512i levels = _mm512_loadu_si512(w + q * 4 * LANES);
            for (int r = 0; r < m; r++) {
                coarse[r] = _mm512_dpbusd_epi32(
                    coarse[r], levels, _mm512_set1_epi32(((const int32_t *)(in[r].coarse + b * BLOCK))[q]));
                fine[r] = _mm512_dpbusd_epi32(
                    fine[r], levels, _mm512_set1_epi32(((const int32_t *)(in[r].fine + b * BLOCK))[q]));
            }
        }
        for (int r = 0; r < m; r++)
            out[r] += (both_sums(coarse[r], fine[r]) * in[r].scale[b] - 128.0f * in[r].sum[b]) * step;
#elif WORDS
        __m256i sum[MOST_ROWS];
        for (int r = 0; r < m; r++) sum[r] = _mm256_setzero_si256();
        for (int q = 0; q < QUADS; q++) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(w + q * 4 * LANES));
            __m256i even = _mm256_and_si256(both, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(both, 8);
            for (int r = 0; r < m; r++) {
                const int32_t *x = (const int32_t *)(in[r].words + b * BLOCK) + 2 * q;
                __m256i one = _mm256_madd_epi16(even, _mm256_set1_epi32(x[0]));
                sum[r] = _mm256_add_epi32(sum[r], _mm256_add_epi32(one, _mm256_madd_epi16(odd, _mm256_set1_epi32(x[1]))));
            }
        }
        for (int r = 0; r < m; r++)
            out[r] += ((vec)_mm256_cvtepi32_ps(sum[r]) * in[r].scale[b] - 128.0f * in[r].sum[b]) * step;
#else
        for (int r = 0; r < m; r++) {
            vec sum = {0};
            for (int q = 0; q < QUADS; q++)
                sum = quad_product(w + q * 4 * LANES, in[r].values + b * BLOCK + 4 * q, 0, 255, sum);
            out[r] += (sum - 128.0f * in[r].sum[b]) * step;
        }
#endif
    }
}

/* Outputs from, to (multiples of L) of m rows; out [m, stride], or added to what is there. */
static inline __attribute__((always_inline)) void outputs_of(const Product *p, const Input *in, int m, int64_t from,
                                                             int64_t to, float *out, int64_t stride, int add) {
    int64_t blocks = p->inputs / BLOCK, bytes = group_bytes(blocks, p->bits);
    for (int64_t n = from; n < to; n += LANES) {
        vec sums[MOST_ROWS];
        const uint8_t *w = p->weights + n / LANES * bytes;
        if (p->bits == 4)
            lanes_4(w, in, blocks, m, sums);
        else
            lanes_8(w, in, blocks, m, sums);
        vec bias = p->bias ? load(p->bias + n) : (vec){0};
        for (int r = 0; r < m; r++) {
            float *at = out + r * stride + n;
            store(at, sums[r] + bias + (add ? load(at) : (vec){0}));
        }
    }
}

static void multiply(const Product *p, const Input *in, int m, int64_t from, int64_t to, float *out, int64_t stride,
                     int add) {
    for (int done = 0; done < m;) { /* rows in portions whose sums stay in registers */
        float *at = out + done * stride;
        int left = m - done;
        if (left >= 8) {
            outputs_of(p, in + done, 8, from, to, at, stride, add);
            done += 8;
        } else if (left >= 4) {
            outputs_of(p, in + done, 4, from, to, at, stride, add);
            done += 4;
        } else if (left >= 2) {
            outputs_of(p, in + done, 2, from, to, at, stride, add);
            done += 2;
        } else {
            outputs_of(p, in + done, 1, from, to, at, stride, add);
            done += 1;
        }
    }
}

/* This thread's share of n outputs. */
static void share(int64_t n, int64_t *from, int64_t *to) {
    int64_t groups = n / LANES, threads = omp_get_num_threads(), me = omp_get_thread_num();
    *from = groups * me / threads * LANES;
    *to = groups * (me + 1) / threads * LANES;
}

int64_t ms_product_floats(int64_t inputs, int64_t rows) { return rows * input_floats(inputs); }

/* x [rows, K] to out [rows, N]; room of ms_product_floats. */
void ms_product(const Product *p, const float *x, int64_t rows, float *out, float *room) {
    Input in[MOST_ROWS]; /* the caller has no more */
    for (int r = 0; r < rows; r++) in[r] = input_of(x + r * p->inputs, p->inputs, room + r * input_floats(p->inputs));
#pragma omp parallel
    {
        int64_t from, to;
        share(p->outputs, &from, &to);
        multiply(p, in, rows, from, to, out, p->outputs, 0);
    }
}

/* ---- the decode step ---- */

typedef struct {
    Product query_key_value, out, gate_up, down;
    const float *before, *between;        /* [E] weights of the two norms */
    const float *of_query, *of_key;       /* [D] or NULL */
    float *keys, *values;                 /* [R, K, C, D] */
    int32_t width, turning;               /* 0: sees all */
} Layer;

typedef struct {
    const Layer *layers;
    const float *norm; /* [E] */
    Product head;
    int32_t n_layers, hidden, heads, kv_heads, dim, inner, slots, parts;
    float epsilon, scaling;
} Model;

typedef struct {
    const Model *model;
    int64_t rows;
    float *x;                  /* [B, E]: embedded tokens; overwritten */
    const int32_t *row;        /* [B] of the cache */
    const int32_t *position;   /* [B] stored position */
    const int32_t *slot;       /* [B] */
    const int32_t *part;       /* [B, P, 4]: slot, length, stored position of the first, shift */
    const float *cos, *sin;    /* [B, 1 + P, D]: to the stored position, and on towards each part; sin signed */
    float *logits;             /* [B, V] */
    float *room;               /* ms_step_floats */
} Step;

static int64_t largest(const Model *m) {
    int64_t most = m->hidden > m->inner ? m->hidden : m->inner, attended = (int64_t)m->heads * m->dim;
    return most > attended ? most : attended;
}

static int64_t shared_floats(const Model *m, int64_t rows) {
    return rows * ((m->heads + 2 * m->kv_heads) * m->dim + m->inner + (int64_t)MOST_THREADS * m->heads * (m->dim + 2));
}

static int64_t own_floats(const Model *m, int64_t rows) { /* of each thread */
    return rows * (input_floats(largest(m)) + 2 * largest(m)) + (int64_t)m->heads * m->dim * m->parts +
           (int64_t)m->heads / m->kv_heads * (m->slots + LANES) + rows * 2 * m->inner;
}

int64_t ms_step_floats(const Model *m, int64_t rows) {
    return shared_floats(m, rows) + MOST_THREADS * own_floats(m, rows);
}

static void norm(const float *x, const float *weight, int64_t n, float epsilon, float *out) {
    vec sum = {0};
    int64_t i = 0;
    float rest = 0;
    for (; i + LANES <= n; i += LANES) sum += load(x + i) * load(x + i);
    for (; i < n; i++) rest += x[i] * x[i];
    float by = 1.0f / sqrtf((total(sum) + rest) / n + epsilon);
    for (i = 0; i < n; i++) out[i] = weight[i] * (x[i] * by);
}

/* The two halves of a head are pairs: x cos + (halves swapped) sin. */
static void turn(const float *x, const float *cos, const float *sin, int dim, float *out) {
    int half = dim / 2;
    for (int d = 0; d < half; d++) {
        float one = x[d], other = x[half + d];
        out[d] = one * cos[d] + other * sin[d];
        out[half + d] = other * cos[half + d] + one * sin[half + d];
    }
}

#if LANES == 16
#define OTHERS(at) at, at + 2, at + 4, at + 6, at + 8, at + 10, at + 12, at + 14, at + 16, at + 18, at + 20, at + 22, \
    at + 24, at + 26, at + 28, at + 30
#else
#define OTHERS(at) at, at + 2, at + 4, at + 6, at + 8, at + 10, at + 12, at + 14
#endif
#ifdef __clang__
#define EVERY_OTHER(a, b, at) __builtin_shufflevector(a, b, OTHERS(at))
#else
#define EVERY_OTHER(a, b, at) __builtin_shuffle(a, b, (ivec){OTHERS(at)})
#endif

/* L totals, that of each vector in its lane. L - 1 steps, each of which folds two vectors into one. */
static inline vec totals(vec *v) {
    for (int n = LANES; n > 1; n /= 2)
        for (int i = 0; i < n / 2; i++)
            v[i] = EVERY_OTHER(v[2 * i], v[2 * i + 1], 0) + EVERY_OTHER(v[2 * i], v[2 * i + 1], 1);
    return v[0];
}

#define MOST_SHARING 4 /* query heads whose sums stay in registers together */

/* Scores of n keys for g query heads; dim and g are constants wherever this is inlined, if they can be. */
static inline __attribute__((always_inline)) void score_keys(const float *key, const float *query, int64_t n, int dim,
                                                             int g, float *scores, int64_t room) {
    int64_t k = 0;
    for (; k + LANES <= n; k += LANES)
        for (int h = 0; h < g; h++) {
            vec sums[LANES];
            for (int i = 0; i < LANES; i++) {
                sums[i] = load(query + h * dim) * load(key + (k + i) * dim);
                for (int d = LANES; d < dim; d += LANES) sums[i] += load(query + h * dim + d) * load(key + (k + i) * dim + d);
            }
            store(scores + h * room + k, totals(sums));
        }
    for (; k < n; k++)
        for (int h = 0; h < g; h++) {
            vec sum = {0};
            for (int d = 0; d < dim; d += LANES) sum += load(query + h * dim + d) * load(key + k * dim + d);
            scores[h * room + k] = total(sum);
        }
}

/* Adds n weighted values to the sums of g query heads. */
static inline __attribute__((always_inline)) void add_values(const float *value, const float *weights, int64_t n, int dim,
                                                             int g, int64_t room, float *out) {
    for (int d = 0; d < dim; d += 4 * LANES) {
        int vectors = dim - d < 4 * LANES ? (dim - d) / LANES : 4;
        vec sums[MOST_SHARING][4];
        for (int h = 0; h < g; h++)
            for (int i = 0; i < vectors; i++) sums[h][i] = load(out + h * dim + d + i * LANES);
        for (int64_t k = 0; k < n; k++)
            for (int i = 0; i < vectors; i++) {
                vec v = load(value + k * dim + d + i * LANES);
                for (int h = 0; h < g; h++) sums[h][i] += weights[h * room + k] * v;
            }
        for (int h = 0; h < g; h++)
            for (int i = 0; i < vectors; i++) store(out + h * dim + d + i * LANES, sums[h][i]);
    }
}

#define SHARING(dim, call) \
    switch (g) { \
    case 1: call(dim, 1); break; \
    case 2: call(dim, 2); break; \
    case 3: call(dim, 3); break; \
    default: call(dim, 4); \
    }
#define EACH_SHAPE(call) \
    if (dim == 64) { SHARING(64, call) } else if (dim == 128) { SHARING(128, call) } else { SHARING(dim, call) }

static void score_run(const float *key, const float *query, int64_t n, int dim, int grouped, float *scores, int64_t room) {
    for (int h = 0; h < grouped; h += MOST_SHARING) {
        int g = grouped - h < MOST_SHARING ? grouped - h : MOST_SHARING;
#define CALL(dim, g) score_keys(key, query + h * dim, n, dim, g, scores + h * room, room)
        EACH_SHAPE(CALL)
#undef CALL
    }
}

static void add_run(const float *value, const float *weights, int64_t n, int dim, int grouped, int64_t room, float *out) {
    for (int h = 0; h < grouped; h += MOST_SHARING) {
        int g = grouped - h < MOST_SHARING ? grouped - h : MOST_SHARING;
#define CALL(dim, g) add_values(value, weights + h * room, n, dim, g, room, out + h * dim)
        EACH_SHAPE(CALL)
#undef CALL
    }
}

/* One key/value head's share of the keys, for the query heads that share it; best and sum as flash attention has them. */
static void attend(const Model *m, const Layer *layer, const Step *step, int64_t b, int kv, int64_t from, int64_t to,
                   const float *queries, float *scores, float *out, float *best, float *sum) {
    int dim = m->dim, grouped = m->heads / m->kv_heads;
    int64_t room = m->slots + LANES, stored = ((int64_t)step->row[b] * m->kv_heads + kv) * m->slots * dim;
    const int32_t *parts = step->part + b * m->parts * 4;
    int64_t n = 0, start = 0;
    struct { int64_t slot, length; } seen[8];
    int n_seen = 0;
    for (int p = 0; p < m->parts; p++) {
        const int32_t *part = parts + 4 * p;
        int64_t length = part[1], first = from > start ? from - start : 0, end = to - start < length ? to - start : length;
        start += length;
        if (layer->width) { /* the key at distance width and beyond is not seen */
            int64_t nearest_hidden = (int64_t)step->position[b] + part[3] - part[2] - layer->width;
            if (first <= nearest_hidden) first = nearest_hidden + 1;
        }
        if (first >= end) continue;
        seen[n_seen].slot = part[0] + first;
        seen[n_seen++].length = end - first;
        score_run(layer->keys + stored + (part[0] + first) * dim, queries + ((int64_t)p * m->heads + kv * grouped) * dim,
                  end - first, dim, grouped, scores + n, room);
        n += end - first;
    }
    for (int g = 0; g < grouped; g++) {
        float *score = scores + g * room, most = -INFINITY;
        for (int64_t k = n; k < n + LANES; k++) score[k] = -INFINITY;
        vec tops = spread(-INFINITY), all = {0};
        for (int64_t k = 0; k < n; k += LANES) tops = pick(load(score + k) > tops, load(score + k), tops);
        for (int i = 0; i < LANES; i++) most = tops[i] > most ? tops[i] : most;
        for (int64_t k = 0; k < n; k += LANES) {
            vec weight = exp_of(load(score + k) - most);
            weight = pick(load(score + k) == -INFINITY, (vec){0}, weight);
            store(score + k, weight);
            all += weight;
        }
        best[g] = most;
        sum[g] = total(all);
        for (int d = 0; d < dim; d++) out[g * dim + d] = 0;
    }
    int64_t k = 0;
    for (int s = 0; s < n_seen; k += seen[s++].length)
        add_run(layer->values + stored + seen[s].slot * dim, scores + k, seen[s].length, dim, grouped, room, out);
}

static void inputs_of(const float *x, int64_t rows, int64_t n, float *room, Input *in) {
    for (int64_t r = 0; r < rows; r++) in[r] = input_of(x + r * n, n, room + r * input_floats(n));
}

/* Where all threads of a step meet. OpenMP's own barrier puts threads to sleep once there are more of them than
 * processors, and each Python thread that computes has a team: 180 times a token, that takes longer than the token. */
typedef struct {
    int arrived, phase;
} Barrier;

#define SPINS 4096

static void await(Barrier *barrier, int64_t threads) {
    int phase = __atomic_load_n(&barrier->phase, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&barrier->arrived, 1, __ATOMIC_ACQ_REL) == threads) {
        __atomic_store_n(&barrier->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&barrier->phase, phase + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spins = 0; __atomic_load_n(&barrier->phase, __ATOMIC_ACQUIRE) == phase; spins++) {
        if (spins >= SPINS) sched_yield();
#if defined(__x86_64__) || defined(__i386__)
        else __builtin_ia32_pause();
#endif
    }
}

static void layer_step(const Model *m, const Layer *layer, const Step *step, float *shared, float *own,
                       Barrier *barrier) {
    int64_t rows = step->rows, dim = m->dim, heads = m->heads, kv_heads = m->kv_heads, grouped = heads / kv_heads;
    int64_t hidden = m->hidden, attended = heads * dim, joint = (heads + 2 * kv_heads) * dim, from, to;
    int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
    float *x = step->x, *qkv = shared, *act = qkv + rows * joint, *partial = act + rows * m->inner;
    float *room = own, *normed = room + rows * input_floats(largest(m)), *queries = normed + 2 * rows * largest(m);
    float *scores = queries + attended * m->parts, *gate_up = scores + grouped * (m->slots + LANES);
    Input in[MOST_ROWS];

    for (int64_t b = 0; b < rows; b++) norm(x + b * hidden, layer->before, hidden, m->epsilon, normed + b * hidden);
    inputs_of(normed, rows, hidden, room, in);
    share(joint, &from, &to);
    multiply(&layer->query_key_value, in, rows, from, to, qkv, joint, 0);
    await(barrier, threads);
    for (int64_t i = me; i < rows * kv_heads; i += threads) { /* the new keys and values go into their slots */
        int64_t b = i / kv_heads, kv = i % kv_heads;
        int64_t at = (((int64_t)step->row[b] * kv_heads + kv) * m->slots + step->slot[b]) * dim;
        float *key = qkv + b * joint + (heads + kv) * dim;
        if (layer->of_key) norm(key, layer->of_key, dim, m->epsilon, key);
        if (layer->turning)
            turn(key, step->cos + b * (1 + m->parts) * dim, step->sin + b * (1 + m->parts) * dim, dim, layer->keys + at);
        else
            memcpy(layer->keys + at, key, 4 * dim);
        memcpy(layer->values + at, qkv + b * joint + (heads + kv_heads + kv) * dim, 4 * dim);
    }
    await(barrier, threads);
    for (int64_t b = 0; b < rows; b++) {
        int64_t n = 0;
        for (int p = 0; p < m->parts; p++) {
            const float *cos = step->cos + (b * (1 + m->parts) + 1 + p) * dim;
            const float *sin = step->sin + (b * (1 + m->parts) + 1 + p) * dim;
            int64_t length = step->part[(b * m->parts + p) * 4 + 1];
            n += length;
            for (int64_t h = 0; length && h < heads; h++) {
                const float *query = qkv + b * joint + h * dim;
                float *to_part = queries + (p * heads + h) * dim, *plain = normed;
                if (layer->of_query)
                    norm(query, layer->of_query, dim, m->epsilon, plain);
                else
                    memcpy(plain, query, 4 * dim);
                for (int64_t d = 0; d < dim; d++) plain[d] *= m->scaling;
                if (layer->turning)
                    turn(plain, cos, sin, dim, to_part);
                else
                    memcpy(to_part, plain, 4 * dim);
            }
        }
        for (int64_t kv = 0; kv < kv_heads; kv++) {
            float *of_me = partial + ((me * rows + b) * heads + kv * grouped) * (dim + 2);
            attend(m, layer, step, b, kv, n * me / threads, n * (me + 1) / threads, queries, scores, of_me,
                   of_me + grouped * dim, of_me + grouped * (dim + 1));
        }
    }
    await(barrier, threads);
    for (int64_t b = 0; b < rows; b++)
        for (int64_t kv = 0; kv < kv_heads; kv++)
            for (int64_t g = 0; g < grouped; g++) {
                float *to_head = normed + b * attended + (kv * grouped + g) * dim, most = -INFINITY, sum = 0;
                memset(to_head, 0, 4 * dim);
                for (int64_t t = 0; t < threads; t++) {
                    const float *of = partial + ((t * rows + b) * heads + kv * grouped) * (dim + 2);
                    if (of[grouped * dim + g] > most) most = of[grouped * dim + g];
                }
                for (int64_t t = 0; t < threads; t++) {
                    const float *of = partial + ((t * rows + b) * heads + kv * grouped) * (dim + 2);
                    if (of[grouped * dim + g] == -INFINITY) continue; /* it saw nothing */
                    float weight = expf(of[grouped * dim + g] - most);
                    sum += weight * of[grouped * (dim + 1) + g];
                    for (int64_t d = 0; d < dim; d++) to_head[d] += weight * of[g * dim + d];
                }
                for (int64_t d = 0; d < dim; d++) to_head[d] /= sum;
            }
    inputs_of(normed, rows, attended, room, in);
    share(hidden, &from, &to);
    multiply(&layer->out, in, rows, from, to, x, hidden, 1);
    await(barrier, threads);
    for (int64_t b = 0; b < rows; b++) norm(x + b * hidden, layer->between, hidden, m->epsilon, normed + b * hidden);
    inputs_of(normed, rows, hidden, room, in);
    share(m->inner, &from, &to); /* of gate and of up alike, so that their product needs no other thread */
    multiply(&layer->gate_up, in, rows, from, to, gate_up, 2 * m->inner, 0);
    multiply(&layer->gate_up, in, rows, m->inner + from, m->inner + to, gate_up, 2 * m->inner, 0);
    for (int64_t b = 0; b < rows; b++)
        for (int64_t i = from; i < to; i += LANES) {
            vec gate = load(gate_up + b * 2 * m->inner + i), up = load(gate_up + (2 * b + 1) * m->inner + i);
            store(act + b * m->inner + i, gate / (1.0f + exp_of(-gate)) * up);
        }
    await(barrier, threads);
    inputs_of(act, rows, m->inner, room, in);
    share(hidden, &from, &to);
    multiply(&layer->down, in, rows, from, to, x, hidden, 1);
    await(barrier, threads);
}

/* One token in each of B rows: writes their keys and values, and the logits. */
void ms_step(const Step *step) {
    const Model *m = step->model;
    int64_t rows = step->rows, hidden = m->hidden;
    float *shared = step->room;
    Barrier barrier = {0, 0};
#pragma omp parallel num_threads(omp_get_max_threads() < MOST_THREADS ? omp_get_max_threads() : MOST_THREADS)
    {
        float *own = shared + shared_floats(m, rows) + omp_get_thread_num() * own_floats(m, rows);
        for (int l = 0; l < m->n_layers; l++) layer_step(m, m->layers + l, step, shared, own, &barrier);
        Input in[MOST_ROWS];
        float *normed = own + rows * input_floats(largest(m));
        int64_t from, to;
        for (int64_t b = 0; b < rows; b++) norm(step->x + b * hidden, m->norm, hidden, m->epsilon, normed + b * hidden);
        inputs_of(normed, rows, hidden, own, in);
        share(m->head.outputs, &from, &to);
        multiply(&m->head, in, rows, from, to, step->logits, m->head.outputs, 0);
    }
}

/* ---- pieces of many tokens: what lies between products that others do, in bfloat16 ---- */

typedef uint16_t half_t;
typedef half_t halves __attribute__((vector_size(2 * LANES)));
typedef half_t halves_u __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));

static inline vec widen(const half_t *p) {
    return (vec)(__builtin_convertvector(*(const halves_u *)p, uvec) << 16);
}

static inline void narrow(half_t *p, vec v) { /* to the nearest, ties to even */
    uvec bits = (uvec)v;
    *(halves_u *)p = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, halves);
}

static inline float widen_one(half_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* x [M, E] += add, if there is any; out [M, E] bfloat16 is its norm. E is a multiple of 16. */
void ms_add_norm(float *x, const half_t *add, const float *weight, int64_t rows, int64_t n, float epsilon, half_t *out) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        float *of_row = x + r * n;
        vec sum = {0};
        for (int64_t i = 0; i < n; i += LANES) {
            vec v = load(of_row + i);
            if (add) {
                v += widen(add + r * n + i);
                store(of_row + i, v);
            }
            sum += v * v;
        }
        float by = 1.0f / sqrtf(total(sum) / n + epsilon);
        for (int64_t i = 0; i < n; i += LANES) narrow(out + r * n + i, load(weight + i) * (load(of_row + i) * by));
    }
}

/* out [M, I] = silu(gate) * up, of [M, gate | up]. I is a multiple of 16. */
void ms_gate(const half_t *gate_up, int64_t rows, int64_t inner, half_t *out) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < inner; i += LANES) {
            vec gate = widen(gate_up + 2 * r * inner + i), up = widen(gate_up + (2 * r + 1) * inner + i);
            narrow(out + r * inner + i, gate / (1.0f + exp_of(-gate)) * up);
        }
}

typedef struct {
    int64_t rows, n, heads, kv_heads, dim, slots, shifts;
    const int32_t *row;           /* [B] */
    const int32_t *slot;          /* [B, n] */
    const float *cos, *sin;       /* [B, n, D] to the stored positions; sin signed */
    const float *on_cos, *on_sin; /* [B, S, D] on from there */
    float epsilon;
} Piece;

static void turn_half(const float *x, const float *cos, const float *sin, int64_t dim, half_t *out) {
    float turned[1024];
    turn(x, cos, sin, dim, turned);
    for (int64_t d = 0; d < dim; d += LANES) narrow(out + d, load(turned + d));
}

/* qkv [M, (H + 2K) D] bfloat16: keys and values go into their slots, turned queries to [S, B, H, n, D] bfloat16.
 * D is a multiple of 16, up to 1,024. */
void ms_spread(const Piece *piece, const half_t *qkv, const float *of_query, const float *of_key, int32_t turning,
               float *keys, float *values, half_t *queries) {
    int64_t dim = piece->dim, heads = piece->heads, kv_heads = piece->kv_heads, all = heads + 2 * kv_heads;
#pragma omp parallel for
    for (int64_t t = 0; t < piece->rows * piece->n; t++) {
        int64_t b = t / piece->n, i = t % piece->n;
        const float *cos = piece->cos + t * dim, *sin = piece->sin + t * dim;
        for (int64_t h = 0; h < all; h++) {
            float head[1024], turned[1024], *to = head;
            for (int64_t d = 0; d < dim; d += LANES) store(head + d, widen(qkv + (t * all + h) * dim + d));
            if (h >= heads + kv_heads) {
                int64_t kv = h - heads - kv_heads;
                float *at = values + ((piece->row[b] * kv_heads + kv) * piece->slots + piece->slot[t]) * dim;
                memcpy(at, head, 4 * dim);
                continue;
            }
            const float *weight = h < heads ? of_query : of_key;
            if (weight) norm(head, weight, dim, piece->epsilon, head);
            if (turning) {
                turn(head, cos, sin, dim, turned);
                to = turned;
            }
            if (h >= heads) {
                float *at = keys + ((piece->row[b] * kv_heads + h - heads) * piece->slots + piece->slot[t]) * dim;
                memcpy(at, to, 4 * dim);
                continue;
            }
            for (int64_t s = 0; s < piece->shifts; s++) {
                half_t *query = queries + (((s * piece->rows + b) * heads + h) * piece->n + i) * dim;
                const float *on_cos = piece->on_cos + (b * piece->shifts + s) * dim;
                const float *on_sin = piece->on_sin + (b * piece->shifts + s) * dim;
                if (turning)
                    turn_half(to, on_cos, on_sin, dim, query);
                else
                    for (int64_t d = 0; d < dim; d += LANES) narrow(query + d, load(to + d));
            }
        }
    }
}

/* Negative log-likelihood [M] of targets [M] under logits [M, V] bfloat16. */
void ms_nll(const half_t *logits, const int64_t *targets, int64_t rows, int64_t n, float *out) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const half_t *of_row = logits + r * n;
        int64_t whole = n / LANES * LANES;
        vec most = spread(-INFINITY), sum = {0};
        for (int64_t i = 0; i < whole; i += LANES) {
            vec v = widen(of_row + i);
            most = pick(v > most, v, most);
        }
        float top = -INFINITY, all;
        for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
        for (int64_t i = whole; i < n; i++) top = fmaxf(top, widen_one(of_row[i]));
        for (int64_t i = 0; i < whole; i += LANES) sum += exp_of(widen(of_row + i) - top);
        all = total(sum);
        for (int64_t i = whole; i < n; i++) all += expf(widen_one(of_row[i]) - top);
        out[r] = top + logf(all) - widen_one(of_row[targets[r]]);
    }
}
