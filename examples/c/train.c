/* train.c - a whole training program in C11 against strata.h alone: a small MLP learns a surface under ZeRO-3.
 *
 *   c_train MANIFEST [KEY=VALUE ...]     the settings after the manifest override it
 *
 * A process is a rank: alone it is a world of one; mpirun -np 2 c_train ..., torchrun, srun, or STRATA_RANK,
 * STRATA_WORLD_SIZE and STRATA_JOB set by hand make several. Each draws samples of its own, Strata adds the gradients.
 * One unit per layer. The engine logs a line every steps_per_print steps, on stderr, with the loss it is given.
 * Exit codes: 0 trained, 1 an error, with its text on stderr, 2 usage. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "strata/strata.h"

enum { LAYERS = 3, WIDTH = 64, MAX_BATCH = 256, STEPS = 200 };
static const int64_t SIZES[LAYERS + 1] = {2, WIDTH, WIDTH, 1};

typedef struct layer {
  strata_unit unit;
  strata_param weight;
  int64_t shape[2]; /* outputs, inputs */
} layer;
typedef float rows[MAX_BATCH][WIDTH]; /* one row per sample */

/* Every call returns a status. The text of a failure says what was being done, to what, with which numbers. */
#define TRY(call)                                              \
  do {                                                         \
    if ((call) != STRATA_OK) {                                 \
      fprintf(stderr, "%s: %s\n", #call, strata_last_error()); \
      return 1;                                                \
    }                                                          \
  } while (0)

static float uniform(uint32_t* seed) { /* in [-1, 1) */
  *seed = *seed * 1664525u + 1013904223u;
  return (float)(*seed >> 8) / 8388608.0f - 1.0f;
}

static strata_tensor tensor(void* data, const int64_t* shape) {
  strata_tensor t;
  STRATA_INIT(&t);
  t.data = data, t.shape = shape, t.ndim = 2, t.dtype = STRATA_F32, t.device_type = STRATA_CPU;
  return t;
}

/* Registers the layers, lets Strata plan and allocate, and writes rank 0's first weights. */
static int make_model(strata_engine* e, layer* layers) {
  static float values[WIDTH * WIDTH];
  char name[64];
  for (int k = 0; k < LAYERS; ++k) {
    layer* l = &layers[k];
    l->shape[0] = SIZES[k + 1], l->shape[1] = SIZES[k];
    snprintf(name, sizeof name, "layer%d", k);
    TRY(strata_add_unit(e, name, &l->unit));
    snprintf(name, sizeof name, "layer%d.weight", k);
    strata_param_args p;
    STRATA_INIT(&p);
    p.name = name, p.shape = l->shape, p.ndim = 2, p.dtype = STRATA_F32;
    TRY(strata_add_param(e, l->unit, &p, &l->weight));
  }
  TRY(strata_commit(e));
  uint32_t seed = 1;
  for (int k = 0; k < LAYERS; ++k) {
    const float scale = sqrtf(3.0f / (float)SIZES[k]);
    for (int64_t i = 0; i < SIZES[k] * SIZES[k + 1]; ++i) values[i] = scale * uniform(&seed);
    const strata_tensor t = tensor(values, layers[k].shape);
    TRY(strata_write_param(e, layers[k].weight, &t, 0));
  }
  return 0;
}

/* out = in W^T, and tanh of it except in the last layer. */
static int forward(strata_engine* e, const layer* l, int is_last, int batch, rows in, rows out) {
  const int64_t outputs = l->shape[0], inputs = l->shape[1];
  strata_tensor weight;
  STRATA_INIT(&weight);
  TRY(strata_fetch(e, l->unit, NULL)); /* the unit is whole here, and the next ones are on their way */
  TRY(strata_param_view(e, l->weight, &weight));
  const float* w = weight.data;
  for (int n = 0; n < batch; ++n) {
    for (int64_t o = 0; o < outputs; ++o) {
      float sum = 0;
      for (int64_t i = 0; i < inputs; ++i) sum += w[o * inputs + i] * in[n][i];
      out[n][o] = is_last ? sum : tanhf(sum);
    }
  }
  TRY(strata_release(e, l->unit, NULL));
  return 0;
}

/* From the gradient of a layer's sums to that of its weight, handed over, and of the sums of the layer before. */
static int backward(strata_engine* e, const layer* l, int batch, rows in, rows d_out, rows d_in) {
  const int64_t outputs = l->shape[0], inputs = l->shape[1];
  float g[WIDTH * WIDTH] = {0};
  strata_tensor weight, grad = tensor(g, l->shape);
  STRATA_INIT(&weight);
  TRY(strata_fetch(e, l->unit, NULL));
  TRY(strata_param_view(e, l->weight, &weight));
  const float* w = weight.data;
  for (int n = 0; n < batch; ++n) {
    for (int64_t i = 0; i < inputs; ++i) d_in[n][i] = 0;
    for (int64_t o = 0; o < outputs; ++o) {
      for (int64_t i = 0; i < inputs; ++i) {
        g[o * inputs + i] += d_out[n][o] * in[n][i];
        d_in[n][i] += d_out[n][o] * w[o * inputs + i];
      }
    }
    for (int64_t i = 0; i < inputs; ++i) d_in[n][i] *= 1 - in[n][i] * in[n][i];
  }
  TRY(strata_release(e, l->unit, NULL));
  TRY(strata_grad(e, l->weight, &grad, NULL));
  TRY(strata_grads_done(e, l->unit)); /* reduced while the layer before computes */
  return 0;
}

/* One micro-batch of samples drawn from `seed`, forward and backward; adds its mean square error to `loss`. */
static int micro_batch(strata_engine* e, const layer* layers, int batch, uint32_t* seed, double* loss) {
  static rows values[LAYERS + 1], d[2];
  for (int n = 0; n < batch; ++n) values[0][n][0] = uniform(seed), values[0][n][1] = uniform(seed);
  for (int k = 0; k < LAYERS; ++k) {
    if (forward(e, &layers[k], k == LAYERS - 1, batch, values[k], values[k + 1])) return 1;
  }
  for (int n = 0; n < batch; ++n) {
    const float target = sinf(3 * values[0][n][0] + values[0][n][1]);
    const float error = values[LAYERS][n][0] - target;
    *loss += error * error / batch;
    d[LAYERS % 2][n][0] = 2 * error / (float)batch;
  }
  for (int k = LAYERS; k-- > 0;) {
    if (backward(e, &layers[k], batch, values[k], d[(k + 1) % 2], d[k % 2])) return 1;
  }
  TRY(strata_end_backward(e));
  return 0;
}

static int train(strata_engine* e) {
  layer layers[LAYERS];
  const char* text = NULL;
  TRY(strata_get_setting(e, "train_micro_batch_size_per_gpu", &text));
  const int batch = atoi(text);
  if (batch > MAX_BATCH) return fprintf(stderr, "a batch of %d: at most %d\n", batch, MAX_BATCH), 1;
  TRY(strata_get_setting(e, "gradient_accumulation_steps", &text));
  const int micro_batches = atoi(text); /* of one step; the update takes the mean of their gradients */
  if (make_model(e, layers)) return 1;
  strata_ranks ranks;
  STRATA_INIT(&ranks);
  TRY(strata_get_ranks(e, &ranks));
  uint32_t seed = 1000u + (uint32_t)ranks.data_parallel_rank;
  for (int step = 1; step <= STEPS; ++step) {
    double loss = 0;
    for (int k = 0; k < micro_batches; ++k) {
      if (micro_batch(e, layers, batch, &seed, &loss)) return 1;
    }
    strata_step_args args;
    STRATA_INIT(&args);
    args.lr = NAN; /* the manifest's */
    args.loss = loss / micro_batches;
    args.tokens = (uint64_t)(batch * micro_batches); /* samples here: they give the line its speed */
    TRY(strata_step(e, &args)); /* returns while the update runs; the next fetch of a unit waits for its own part */
  }
  TRY(strata_wait(e)); /* the last update may still run, and may fail */
  return 0;
}

int main(int argc, char** argv) {
  if (argc < 2) return fprintf(stderr, "usage: %s MANIFEST [KEY=VALUE ...]\n", argv[0]), 2;
  strata_engine_args args;
  STRATA_INIT(&args);
  args.manifest = argv[1];
  args.overrides = (const char* const*)argv + 2, args.override_count = (uint64_t)(argc - 2);
  strata_engine* e = NULL;
  TRY(strata_open(&args, &e));
  const int failed = train(e);
  strata_close(e);
  return failed;
}
