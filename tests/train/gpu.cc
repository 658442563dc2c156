#include "tests/train/gpu.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>

#include "core/plugins/event.h"
#include "tests/gpu_sim/gpu_sim_control.h"

namespace strata::test {

namespace {

const std::string kSimulated = std::string(STRATA_TEST_PLUGIN_DIR) + "/gpu_sim.so";

const strata_device_api* table_of(const std::string& plugin) {
  return load<strata_device_api>(plugin == "gpu_sim" ? kSimulated : plugin, STRATA_DEVICE);
}

}  // namespace

std::string Gpu::absent(int gpus) {
  if (access((std::string(STRATA_BUILD_PLUGIN_DIR) + "/device_cuda.so").c_str(), R_OK) != 0) {
    return "this build has no device_cuda";
  }
  Rank last(gpus - 1, gpus, true, "probe");
  Options options;
  const strata_open_args args = last.args(&options);
  strata_device* self = nullptr;
  const strata_device_api* api = table_of("device_cuda");
  const strata_status code = api->open(&args, &self);
  if (code == STRATA_OK) api->close(self);
  return code == STRATA_OK ? "" : take_failure(code).text();
}

Gpu::Gpu(const std::string& plugin, const std::string& job, int rank, int world, int delay_us)
    : host_(rank, world, true, job), api_(table_of(plugin)) {
  if (plugin == "gpu_sim") options_.set("memory_bytes", int64_t{1} << 30).set("delay_us", delay_us);
  const strata_open_args args = host_.args(&options_);
  EXPECT_EQ(api_->open(&args, &self_), STRATA_OK);
  for (strata_stream* stream : {&stream_, &other_}) EXPECT_EQ(api_->stream_create(self_, 0, stream), STRATA_OK);
  lender_ = {sizeof(lender_), STRATA_ABI_MINOR, this, lend, take_back};
}

// What a framework's allocator does: memory that kernels before may still use, and kernels after it use again.
void* Gpu::lend(void* self, uint64_t bytes, const strata_stream* stream) {
  auto* gpu = static_cast<Gpu*>(self);
  void* memory = nullptr;
  EXPECT_EQ(gpu->api_->alloc(gpu->self_, bytes, &memory), STRATA_OK);
  EXPECT_EQ(gpu->api_->fill(gpu->self_, memory, 0xFF, bytes, stream ? stream : &gpu->stream_), STRATA_OK);
  if (!stream) {
    EXPECT_EQ(gpu->api_->stream_wait_host(gpu->self_, &gpu->stream_), STRATA_OK);
  }
  gpu->lent_[memory] = bytes;
  ++gpu->loans_;
  ++gpu->on_loan_;
  return memory;
}

void Gpu::take_back(void* self, void* memory, const strata_stream* stream) {
  auto* gpu = static_cast<Gpu*>(self);
  const uint64_t bytes = gpu->lent_.at(memory);
  gpu->lent_.erase(memory);
  --gpu->on_loan_;
  EXPECT_EQ(gpu->api_->fill(gpu->self_, memory, 0xFF, bytes, stream ? stream : &gpu->stream_), STRATA_OK);
  gpu->device_.push_back(memory);
}

Gpu::~Gpu() {
  EXPECT_EQ(on_loan_, 0);
  wait();
  for (strata_stream* stream : {&stream_, &other_}) api_->stream_destroy(self_, stream);
  api_->close(self_);
}

void Gpu::hold_for(std::chrono::milliseconds time) {
  const Event held = Event::create();
  const auto* control = load<strata_gpu_sim_control_api>(kSimulated, STRATA_GPU_SIM_CONTROL);
  EXPECT_EQ(control->hold(self_, &stream_, held.get()), STRATA_OK);
  holder_ = std::thread([held, time] {
    std::this_thread::sleep_for(time);
    held->set(Ok());
  });
}

void* Gpu::to_device(const std::vector<float>& values, const strata_stream* stream) {
  const uint64_t bytes = values.size() * sizeof(float);
  EXPECT_EQ(api_->alloc_pinned(self_, bytes, &pinned_.emplace_back()), STRATA_OK);
  EXPECT_EQ(api_->alloc(self_, bytes, &device_.emplace_back()), STRATA_OK);
  std::memcpy(pinned_.back(), values.data(), bytes);
  EXPECT_EQ(api_->copy(self_, device_.back(), pinned_.back(), bytes, stream), STRATA_OK);
  return device_.back();
}

strata_tensor Gpu::tensor(const std::vector<float>& values, const std::vector<int64_t>& shape,
                          const strata_stream* stream) {
  strata_tensor t;
  STRATA_INIT(&t);
  t.data = to_device(values, stream);
  t.device_type = stream->domain;
  t.device_id = stream->device_id;
  t.dtype = STRATA_F32;
  t.ndim = static_cast<int32_t>(shape.size());
  t.shape = shape.data();
  return t;
}

strata_tensor Gpu::gradient(const strata_tensor& weight, const std::vector<float>& noise) {
  strata_tensor t = weight;
  t.dtype = STRATA_F32;
  if (noise.empty()) return t;
  t.data = to_device(noise, &stream_);
  auto* sum = static_cast<float*>(t.data);
  EXPECT_EQ(api_->accumulate(self_, sum, weight.data, weight.dtype, noise.size(), &stream_), STRATA_OK);
  return t;
}

strata_tensor Gpu::zeros(const strata_tensor& weight, uint64_t elements) {
  strata_tensor t = weight;
  t.dtype = STRATA_F32;
  if (elements == 0) return t;
  EXPECT_EQ(api_->alloc(self_, elements * sizeof(float), &device_.emplace_back()), STRATA_OK);
  EXPECT_EQ(api_->fill(self_, device_.back(), 0, elements * sizeof(float), &stream_), STRATA_OK);
  t.data = device_.back();
  return t;
}

void Gpu::sync() {
  if (holder_.joinable()) holder_.join();
  for (const strata_stream* stream : {&stream_, &other_}) EXPECT_EQ(api_->stream_wait_host(self_, stream), STRATA_OK);
}

void Gpu::wait() {
  sync();
  for (void* p : device_) api_->free(self_, p);
  for (void* p : pinned_) api_->free_pinned(self_, p);
  device_.clear();
  pinned_.clear();
}

}  // namespace strata::test
