// adamw_plugin.cc - see adamw_plugin.h.
#include "adamw_plugin.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

#include "strata/plugin.h"

namespace strata::bench {
namespace {

[[noreturn]] void die(const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  std::exit(1);
}

void expect_ok(strata_status code) {
  const Status status = take_failure(code);
  if (!status.ok()) die(status.text());
}

const strata_optimizer_api* load(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) die(dlerror());
  const auto entry = reinterpret_cast<strata_plugin_entry_fn>(dlsym(handle, STRATA_PLUGIN_ENTRY));
  if (entry == nullptr) die(library + " exports no " STRATA_PLUGIN_ENTRY);
  return static_cast<const strata_optimizer_api*>(entry(STRATA_ABI_MINOR)->get_interface(STRATA_OPTIMIZER));
}

strata_option text_option(const char* key, const std::string& value) {
  strata_option o{};
  o.struct_size = sizeof(o);
  o.key = key;
  o.type = STRATA_OPT_STRING;
  o.s = value.c_str();
  return o;
}

}  // namespace

AdamwPlugin::AdamwPlugin(const std::string& library, const std::string& layout, const std::string& isa,
                         unsigned threads)
    : host_([](strata_log_level, const std::string&,
               const std::string& text) { std::fprintf(stderr, "%s\n", text.c_str()); },
            STRATA_LOG_INFO, threads),
      api_(load(library)) {
  const strata_option items[] = {text_option("layout", layout), text_option("isa", isa)};
  const strata_options options = {sizeof(options), STRATA_ABI_MINOR, items, 2, sizeof(strata_option)};
  strata_open_args args{};
  args.struct_size = sizeof(args);
  args.host = host_.c();
  args.options = &options;
  args.world = args.local_world = 1;
  expect_ok(api_->open(&args, &self_));
}

AdamwPlugin::~AdamwPlugin() { api_->close(self_); }

void AdamwPlugin::step(const AdamwJob& job, const strata_optim_group& group, uint64_t step, float grad_scale) {
  float scalars[STRATA_OPTIM_SCALARS];
  expect_ok(api_->scalars(self_, &group, step, scalars));
  const strata_optim_span span = {0, job.count, 0, 0};
  strata_optim_args args{};
  args.struct_size = sizeof(args);
  args.spans = &span;
  args.span_count = 1;
  args.span_stride = sizeof(span);
  args.scalars = scalars;
  args.scalar_sets = 1;
  args.grad = job.grad;
  args.grad_dtype = job.grad_dtype;
  args.weight_dtype = job.weight_dtype;
  args.weight = job.weight;
  args.state = job.state;
  args.grad_scale = &grad_scale;
  expect_ok(api_->step(self_, &args, nullptr));
}

}  // namespace strata::bench

// --- for vs_deepspeed.py ----------------------------------------------------------------------------------------

using strata::bench::AdamwPlugin;

extern "C" STRATA_EXPORT void* bench_adamw_open(const char* library, const char* layout, unsigned threads) {
  return new AdamwPlugin(library, layout, "auto", threads);
}

extern "C" STRATA_EXPORT void bench_adamw_close(void* plugin) { delete static_cast<AdamwPlugin*>(plugin); }

// `state` has 3 pointers; dtypes are strata_dtype numbers; settings are those of vs_deepspeed.py.
extern "C" STRATA_EXPORT void bench_adamw_step(void* plugin, int32_t grad_dtype, int32_t weight_dtype, const void* grad,
                                               void* weight, void* const* state, uint64_t count, uint64_t step) {
  const strata_optim_group group = {sizeof(group), STRATA_ABI_MINOR, 1e-4, 0.9, 0.95, 1e-8, 0.1};
  static_cast<AdamwPlugin*>(plugin)->step(
      {grad_dtype, weight_dtype, grad, weight, {state[0], state[1], state[2]}, count}, group, step, 1.0f);
}
