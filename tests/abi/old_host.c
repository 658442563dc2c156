/* old_host.c - a host program and a plugin of release 1.0, both run by the present library.
 *
 * Compiled as C11 against tests/abi/frozen_1_0 and linked with today's libstrata.so. It trains one small unit for
 * three steps, once with the optimizer state in offload_cpu and once in old_tier (old_tier.c), and the weights must
 * come out the same, bit for bit, and not as they began.
 *
 *   old_host PLUGIN_DIR OLD_TIER_TOML       exit 0: they did */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "strata/strata.h"

enum { ROWS = 33, COLUMNS = 65, COUNT = ROWS * COLUMNS };

static int check(strata_status code, const char* what) {
  if (code == STRATA_OK) return 1;
  printf("%s: %s: %s\n", what, strata_status_name(code), strata_last_error());
  return 0;
}

static void STRATA_CALL count_old_tier(void* ctx, strata_log_level level, const char* domain, const char* text) {
  (void)level;
  if (strstr(domain, "old_tier") && strstr(text, "open")) ++*(int*)ctx;
}

static strata_tensor tensor_of(float* data, const int64_t* shape) {
  strata_tensor t;
  STRATA_INIT(&t);
  t.data = data;
  t.device_type = STRATA_CPU;
  t.dtype = STRATA_F32;
  t.ndim = 2;
  t.shape = shape;
  return t;
}

static strata_engine* open_engine(const char* plugin_dir, const char* tier, int* opened) {
  char manifest[2048];
  snprintf(manifest, sizeof manifest,
           "train_micro_batch_size_per_gpu = 1\ngradient_accumulation_steps = 1\ndeadline_seconds = 20\nthreads = 1\n"
           "[plugins]\noffload_cpu = \"%s\"\n"
           "[zero_optimization]\nstage = 2\n[zero_optimization.offload_optimizer]\ndevice = \"cpu\"\n",
           tier);
  strata_engine_args args;
  STRATA_INIT(&args);
  args.manifest_text = manifest;
  args.plugin_dir = plugin_dir;
  args.log = count_old_tier;
  args.log_ctx = opened;
  args.job = "old_host";
  args.threads = 1;
  args.world = 1;
  strata_engine* engine = NULL;
  check(strata_open(&args, &engine), "open");
  return engine;
}

static int add_weight(strata_engine* engine, const int64_t* shape, strata_param* param) {
  strata_unit unit = 0;
  strata_param_args args;
  STRATA_INIT(&args);
  args.name = "w";
  args.shape = shape;
  args.ndim = 2;
  args.dtype = STRATA_BF16;
  return check(strata_add_unit(engine, "layer", &unit), "add_unit") &&
         check(strata_add_param(engine, unit, &args, param), "add_param") && check(strata_commit(engine), "commit");
}

static int train(strata_engine* engine, float* weights) {
  const int64_t shape[2] = {ROWS, COLUMNS};
  strata_param param = 0;
  if (!add_weight(engine, shape, &param)) return 0;
  float values[COUNT];
  for (int i = 0; i < COUNT; ++i) values[i] = 0.05f * sinf((float)i);
  strata_tensor t = tensor_of(values, shape);
  if (!check(strata_write_param(engine, param, &t, 0), "write_param")) return 0;
  for (int step = 0; step < 3; ++step) {
    for (int i = 0; i < COUNT; ++i) values[i] = cosf((float)(i + step));
    if (!check(strata_fetch(engine, 0, NULL), "fetch") || !check(strata_release(engine, 0, NULL), "release") ||
        !check(strata_grad(engine, param, &t, NULL), "grad") || !check(strata_end_backward(engine), "end_backward") ||
        !check(strata_step(engine, NULL), "step")) {
      return 0;
    }
  }
  strata_tensor out = tensor_of(weights, shape);
  return check(strata_read_param(engine, param, "master", &out), "read_param");
}

int main(int argc, char** argv) {
  static float weights[2][COUNT];
  int opened = 0;
  if (argc != 3) return 2;
  for (int run = 0; run < 2; ++run) {
    strata_engine* engine = open_engine(argv[1], run ? argv[2] : "offload_cpu", &opened);
    const int trained = engine && train(engine, weights[run]);
    strata_close(engine);
    if (!trained) return 1;
  }
  if (opened == 0) printf("the plugin of release 1.0 was not used\n");
  if (weights[0][1] == 0.05f * sinf(1)) printf("nothing was trained\n");
  const int same = memcmp(weights[0], weights[1], sizeof weights[0]) == 0;
  if (!same) printf("the weights differ between offload_cpu and the plugin of release 1.0\n");
  return same && opened > 0 && weights[0][1] != 0.05f * sinf(1) ? 0 : 1;
}
