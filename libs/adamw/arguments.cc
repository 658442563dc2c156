// arguments.cc - see arguments.h.
#include "adamw/arguments.h"

#include <algorithm>

#include "plugin_kit/dtypes.h"
#include "plugin_kit/error.h"

namespace strata::adamw {

using plugin_kit::is_float;
using plugin_kit::raise;

std::string dtype_name(strata_dtype dtype) {
  if (dtype == STRATA_F32) return "F32";
  if (dtype == STRATA_BF16) return "BF16";
  if (dtype == STRATA_F16) return "F16";
  return "dtype " + std::to_string(dtype);
}

Grad grad_of(strata_dtype dtype) {
  return dtype == STRATA_F32 ? kGradF32 : dtype == STRATA_BF16 ? kGradBf16 : kGradF16;
}

Pointers pointers_at(Form form, const strata_optim_args& args, uint64_t offset) {
  Pointers p{};
  if (args.weight != nullptr) p.weight = static_cast<char*>(args.weight) + offset * weight_bytes(form);
  void* const* state = args.state;
  if (form != kSplitF32) p.master = static_cast<char*>(*state++) + offset * (form == kSplitBf16 ? 2 : 4);
  p.exp_avg = static_cast<float*>(state[0]) + offset;
  p.exp_avg_sq = static_cast<float*>(state[1]) + offset;
  return p;
}

namespace {

[[noreturn]] void invalid(const std::string& text) { raise(STRATA_INVALID_ARGUMENT, text); }

std::string describe_span(uint64_t k, const strata_optim_span& s) {
  return "span " + std::to_string(k) + " {offset " + std::to_string(s.offset) + ", length " + std::to_string(s.length) +
         ", scalar_set " + std::to_string(s.scalar_set) + "}";
}

void check_size(const strata_optim_args& a) {
  if (STRATA_HAS(&a, strata_optim_args, stream)) return;
  invalid("struct_size of strata_optim_args is " + std::to_string(a.struct_size) + ", too small");
}

// The end of the spans in elements; each is checked on the way.
uint64_t check_spans(const strata_optim_args& a, bool scalars) {
  if (a.span_count > 0 && (a.spans == nullptr || a.span_stride < sizeof(strata_optim_span))) {
    invalid(std::to_string(a.span_count) + " spans need an address and a stride of at least " +
            std::to_string(sizeof(strata_optim_span)) + " bytes, the stride is " + std::to_string(a.span_stride));
  }
  uint64_t end = 0;
  for (uint64_t k = 0; k < a.span_count; ++k) {
    const strata_optim_span& s = span_at(a, k);
    if (s.length > UINT64_MAX / 8 || s.offset > UINT64_MAX / 8 - s.length)
      invalid(describe_span(k, s) + " is beyond memory");
    if (scalars && s.scalar_set >= a.scalar_sets) {
      invalid(describe_span(k, s) + " names a set of scalars that is not there; there are " +
              std::to_string(a.scalar_sets));
    }
    if (s.length > 0) end = std::max(end, s.offset + s.length);
  }
  return end;
}

void check_pointers(Form form, const strata_optim_args& a, bool weight) {
  const uint32_t arrays = form == kSplitF32 ? 2 : 3;
  if (weight && a.weight == nullptr) invalid("weight is NULL");
  if (a.state == nullptr) invalid("state is NULL");
  for (uint32_t k = 0; k < arrays; ++k) {
    if (a.state[k] == nullptr)
      invalid("state array " + std::to_string(k) + " of " + std::to_string(arrays) + " is NULL");
  }
}

// A weight may be written over exactly the gradient it comes from, but not over any other.
void check_overlap(const Settings& settings, const strata_optim_args& a, uint64_t end) {
  const uint64_t grad_bytes = element_bytes(a.grad_dtype), weight_size = element_bytes(a.weight_dtype);
  const auto grad = reinterpret_cast<uintptr_t>(a.grad), weight = reinterpret_cast<uintptr_t>(a.weight);
  if (grad >= weight + end * weight_size || weight >= grad + end * grad_bytes) return;
  if (settings.split) {
    invalid("gradient and weight overlap; with layout = \"split\" the weight is read as well as written");
  }
  if (grad == weight && grad_bytes == weight_size) return;
  invalid("gradient (" + dtype_name(a.grad_dtype) + ") and weight (" + dtype_name(a.weight_dtype) +
          ") overlap without being the same elements");
}

}  // namespace

uint64_t check_step(const Settings& settings, const strata_optim_args& a) {
  check_size(a);
  const Form form = form_of(settings, a.weight_dtype);
  if (!is_float(a.grad_dtype)) invalid("gradients are F32, BF16 or F16, not " + dtype_name(a.grad_dtype));
  const uint64_t end = check_spans(a, true);
  if (end == 0) return end;
  check_pointers(form, a, true);
  if (a.grad == nullptr) invalid("grad is NULL");
  if (a.scalars == nullptr) invalid("scalars is NULL");
  if (a.grad_scale == nullptr) invalid("grad_scale is NULL");
  check_overlap(settings, a, end);
  return end;
}

Canonical check_copy(const Settings& settings, const strata_optim_args& a, uint32_t index, const void* other,
                     bool import) {
  check_size(a);
  if (index >= kCanonicals) {
    raise(STRATA_OUT_OF_RANGE, "canonical array ", index, " of ", int{kCanonicals});
  }
  if (a.span_count < 1) invalid("one span must say which elements");
  const Canonical array = static_cast<Canonical>(index);
  const Form form = form_of(settings, a.weight_dtype);
  if (check_spans(a, false) == 0) return array;
  check_pointers(form, a, array == kMaster && (import || is_split(form)));
  if (other == nullptr) invalid("the canonical array is NULL");
  return array;
}

}  // namespace strata::adamw
