// plugins.cc - see plugins.h.
#include "plugins.h"

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

const void* load(const std::string& name, const char* interface_id) {
  void* handle = dlopen((STRATA_PLUGIN_DIR "/" + name + ".so").c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) die(dlerror());
  const auto entry = reinterpret_cast<strata_plugin_entry_fn>(dlsym(handle, STRATA_PLUGIN_ENTRY));
  if (entry == nullptr) die(name + " exports no " STRATA_PLUGIN_ENTRY);
  return entry(STRATA_ABI_MINOR)->get_interface(interface_id);
}

strata_option text_option(const char* key, const char* value) {
  strata_option o{};
  o.struct_size = sizeof(o);
  o.key = key;
  o.type = STRATA_OPT_STRING;
  o.s = value;
  return o;
}

strata_open_args open_args(Host& host) {
  strata_open_args args{};
  args.struct_size = sizeof(args);
  args.host = host.c();
  args.world = args.local_world = 1;
  return args;
}

void log_to_stderr(strata_log_level, const std::string&, const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
}

}  // namespace

void expect_ok(strata_status code) {
  const Status status = take_failure(code);
  if (!status.ok()) die(status.text());
}

void skip(const std::string& name, const std::string& reason) {
  std::string quoted;
  for (const char c : reason) quoted += c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
  std::printf("skipped: %s\n{\"name\": \"%s\", \"value\": null, \"skipped\": \"%s\"}\n", reason.c_str(), name.c_str(),
              quoted.c_str());
  std::exit(77);
}

Gpu::Gpu(const std::string& name)
    : api(static_cast<const strata_device_api*>(load("device_cuda", STRATA_DEVICE))),
      host(log_to_stderr, STRATA_LOG_WARN, 2) {
  const strata_open_args args = open_args(host);
  const Status status = take_failure(api->open(&args, &self));
  if (status.code() == STRATA_FAILED_PRECONDITION) skip(name, status.text());
  if (!status.ok()) die(status.text());
  expect_ok(api->stream_create(self, 0, &stream));
}

Gpu::~Gpu() { api->close(self); }

void* Gpu::alloc(uint64_t bytes) {
  void* ptr = nullptr;
  expect_ok(api->alloc(self, bytes, &ptr));
  return ptr;
}

void* Gpu::alloc_pinned(uint64_t bytes) {
  void* ptr = nullptr;
  expect_ok(api->alloc_pinned(self, bytes, &ptr));
  return ptr;
}

void Gpu::copy(void* to, const void* from, uint64_t bytes) { expect_ok(api->copy(self, to, from, bytes, nullptr)); }

void Gpu::wait() { expect_ok(api->stream_wait_host(self, &stream)); }

Optimizer::Optimizer(Host& host, Gpu* gpu, bool split)
    : gpu_(gpu),
      api_(static_cast<const strata_optimizer_api*>(load(gpu ? "optim_adamw_cuda" : "optim_adamw", STRATA_OPTIMIZER))) {
  const strata_option items[] = {text_option("layout", split ? "split" : "whole"), text_option("isa", "scalar")};
  const strata_options options = {sizeof(options), STRATA_ABI_MINOR, items, gpu ? 1u : 2u, sizeof(strata_option)};
  strata_open_args args = open_args(host);
  args.options = &options;
  if (gpu) args.device = gpu->api, args.device_self = gpu->self;
  expect_ok(api_->open(&args, &self_));
}

Optimizer::~Optimizer() { api_->close(self_); }

void Optimizer::step(const Slice& slice, uint64_t step, float grad_scale) {
  const strata_optim_group group = {sizeof(group), STRATA_ABI_MINOR, 1e-3, 0.9, 0.95, 1e-8, 0.1};
  float scalars[STRATA_OPTIM_SCALARS];
  expect_ok(api_->scalars(self_, &group, step, scalars));
  const strata_optim_span span = {0, slice.count, 0, 0};
  strata_optim_args args{};
  args.struct_size = sizeof(args);
  args.spans = &span;
  args.span_count = 1;
  args.span_stride = sizeof(span);
  args.scalars = scalars;
  args.scalar_sets = 1;
  args.grad = slice.grad;
  args.grad_dtype = slice.grad_dtype;
  args.weight_dtype = slice.weight_dtype;
  args.weight = slice.weight;
  args.state = slice.state.data();
  args.grad_scale = &grad_scale;
  if (gpu_ == nullptr) return expect_ok(api_->step(self_, &args, nullptr));
  args.stream = &gpu_->stream;
  expect_ok(api_->step(self_, &args, nullptr));
}

}  // namespace strata::bench
