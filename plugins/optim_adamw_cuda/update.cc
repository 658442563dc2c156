// update.cc - see update.h.
#include "update.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "cuda_kit/error.h"
#include "kernels.h"

namespace strata::adamw {

using cuda_kit::check;
using cuda_kit::kernels_reach;
using cuda_kit::require_reach;
using cuda_kit::Scratch;

namespace {

// Elements of a host array that are on the device at one time: 16 MiB.
constexpr uint64_t kStaged = uint64_t{4} << 20;

void require_arrays(const Gpu& gpu, Form form, const strata_optim_args& args) {
  const uint32_t arrays = form == kSplitF32 ? 2 : 3;
  for (uint32_t k = 0; k < arrays; ++k) {
    require_reach(args.state[k], gpu.ordinal,
                  k + 2 == arrays   ? "exp_avg"
                  : k + 1 == arrays ? "exp_avg_sq"
                                    : "the master",
                  form == kSplitBf16 && k == 0 ? 2 : 4);
  }
}

void require_weight(const Gpu& gpu, Form form, const strata_optim_args& args) {
  require_reach(args.weight, gpu.ordinal, "the weight", weight_bytes(form));
}

// The spans of a call that have elements, as tiles, and the scalars they use.
struct Plan {
  explicit Plan(const strata_optim_args& args) {
    const float* last = nullptr;
    for (uint64_t k = 0; k < args.span_count; ++k) {
      const strata_optim_span& s = span_at(args, k);
      if (s.length == 0) continue;
      const float* set = args.scalars + uint64_t{s.scalar_set} * STRATA_OPTIM_SCALARS;
      if (set != last) scalars.insert(scalars.end(), set, set + kUsedScalars);
      last = set;
      spans.push_back({s.offset, s.length, tiles, scalars.size() / kUsedScalars - 1});
      tiles += (s.offset + s.length - 1) / kTile - s.offset / kTile + 1;
    }
  }
  std::vector<TiledSpan> spans;
  std::vector<float> scalars;  // no more sets than spans
  uint64_t tiles = 0;
};

// The job of a call, but for spans and scalars. `apply` in host memory is the caller's to look at.
Job job_of(const Gpu& gpu, Form form, const strata_optim_args& args) {
  const Pointers p = pointers_at(form, args, 0);
  Job job{};
  job.grad = args.grad;
  job.weight = p.weight;
  job.master = p.master;
  job.exp_avg = p.exp_avg;
  job.exp_avg_sq = p.exp_avg_sq;
  if (kernels_reach(args.grad_scale, gpu.ordinal)) {
    job.grad_scale = args.grad_scale;
  } else {
    job.grad_scale_value = *args.grad_scale;
  }
  const auto aligned = [](const void* ptr, uint64_t bytes) { return reinterpret_cast<uintptr_t>(ptr) % bytes == 0; };
  job.together = aligned(job.grad, 4 * element_bytes(args.grad_dtype)) && aligned(job.weight, 4 * weight_bytes(form)) &&
                 aligned(job.master, form == kSplitBf16 ? 8 : 16) && aligned(job.exp_avg, 16) &&
                 aligned(job.exp_avg_sq, 16);
  return job;
}

// Spans and scalars in one piece of device memory, for a job whose arguments cannot hold them.
class Table {
 public:
  Table(const Gpu& gpu, const Plan& plan, cudaStream_t stream)
      : span_bytes_(plan.spans.size() * sizeof(TiledSpan)),
        device_(gpu.pool, span_bytes_ + plan.scalars.size() * sizeof(float), stream) {
    std::vector<char> host(span_bytes_ + plan.scalars.size() * sizeof(float));
    std::memcpy(host.data(), plan.spans.data(), span_bytes_);
    std::memcpy(host.data() + span_bytes_, plan.scalars.data(), plan.scalars.size() * sizeof(float));
    // Ordinary host memory is copied aside before the call returns.
    check(cudaMemcpyAsync(device_.data(), host.data(), host.size(), cudaMemcpyHostToDevice, stream), "copy of ",
          plan.spans.size(), " spans");
  }
  const TiledSpan* spans() const { return static_cast<const TiledSpan*>(device_.data()); }
  const float* scalars() const {
    return reinterpret_cast<const float*>(static_cast<const char*>(device_.data()) + span_bytes_);
  }

 private:
  uint64_t span_bytes_;
  Scratch device_;
};

}  // namespace

void enqueue_step(const Gpu& gpu, Form form, const strata_optim_args& args, cudaStream_t stream) {
  require_reach(args.grad, gpu.ordinal, "the gradient", element_bytes(args.grad_dtype));
  require_weight(gpu, form, args);
  require_arrays(gpu, form, args);
  Job job = job_of(gpu, form, args);
  if (args.apply != nullptr) {
    if (kernels_reach(args.apply, gpu.ordinal)) {
      job.apply = args.apply;
    } else if (*args.apply == 0) {
      return;
    }
  }
  const Plan plan(args);
  std::optional<Table> table;
  if (plan.spans.size() <= kInlineSpans) {
    std::copy(plan.spans.begin(), plan.spans.end(), job.inline_spans);
    std::copy(plan.scalars.begin(), plan.scalars.end(), job.inline_scalars);
  } else {
    table.emplace(gpu, plan, stream);
    job.spans = table->spans();
    job.scalars = table->scalars();
  }
  job.span_count = static_cast<uint32_t>(plan.spans.size());
  check(launch_step(grad_of(args.grad_dtype), form, job, plan.tiles, stream), "update of ", plan.spans.size(),
        " spans in ", plan.tiles, " tiles");
}

void run_export(const Gpu& gpu, Form form, const strata_optim_args& args, Canonical array, float* out,
                cudaStream_t stream) {
  require_arrays(gpu, form, args);
  const uint64_t count = span_at(args, 0).length;
  const Pointers p = pointers_at(form, args, span_at(args, 0).offset);
  if (array != kMaster || form != kSplitBf16) {
    const void* from = array == kExpAvg ? p.exp_avg : array == kExpAvgSq ? p.exp_avg_sq : p.master;
    if (array == kMaster && form == kSplitF32) from = p.weight;
    check(cudaMemcpyAsync(out, from, count * sizeof(float), cudaMemcpyDefault, stream), "copy of ", count, " elements");
  } else {
    require_weight(gpu, form, args);
    const auto* weight = reinterpret_cast<const uint16_t*>(p.weight);
    const auto* low = static_cast<const uint16_t*>(p.master);
    const bool direct = kernels_reach(out, gpu.ordinal) && reinterpret_cast<uintptr_t>(out) % sizeof(float) == 0;
    std::optional<Scratch> staged;
    if (!direct) staged.emplace(gpu.pool, std::min(count, kStaged) * sizeof(float), stream);
    for (uint64_t begin = 0, n = 0; begin < count; begin += n) {
      n = direct ? count : std::min(kStaged, count - begin);
      float* to = direct ? out : static_cast<float*>(staged->data());
      check(launch_export_split(to, weight + begin, low + begin, n, stream), "master of ", n, " elements");
      if (direct) continue;
      check(cudaMemcpyAsync(out + begin, to, n * sizeof(float), cudaMemcpyDefault, stream), "copy of ", n, " elements");
    }
  }
  check(cudaStreamSynchronize(stream), "waiting for ", count, " elements");
}

namespace {

void import_part(Form form, const strata_optim_args& args, Canonical array, uint64_t offset, const float* in,
                 uint64_t count, cudaStream_t stream) {
  const Pointers p = pointers_at(form, args, offset);
  check(array == kMaster ? launch_import_master(form, p.weight, p.master, in, count, stream)
                         : launch_import_moment(array == kExpAvg ? p.exp_avg : p.exp_avg_sq, in, count, stream),
        "import of ", count, " elements");
}

}  // namespace

void run_import(const Gpu& gpu, Form form, const strata_optim_args& args, Canonical array, const float* in,
                cudaStream_t stream) {
  require_arrays(gpu, form, args);
  if (array == kMaster) require_weight(gpu, form, args);
  const uint64_t first = span_at(args, 0).offset, count = span_at(args, 0).length;
  if (kernels_reach(in, gpu.ordinal) && reinterpret_cast<uintptr_t>(in) % sizeof(float) == 0) {
    import_part(form, args, array, first, in, count, stream);
  } else {
    const Scratch staged(gpu.pool, std::min(count, kStaged) * sizeof(float), stream);
    for (uint64_t begin = 0; begin < count; begin += kStaged) {
      const uint64_t n = std::min(kStaged, count - begin);
      auto* there = static_cast<float*>(staged.data());
      check(cudaMemcpyAsync(there, in + begin, n * sizeof(float), cudaMemcpyDefault, stream), "copy of ", n,
            " elements");
      import_part(form, args, array, first + begin, there, n, stream);
    }
  }
  check(cudaStreamSynchronize(stream), "waiting for ", count, " elements");
}

}  // namespace strata::adamw
