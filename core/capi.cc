// capi.cc - strata.h in terms of Engine: locks, argument checks, and the only catch of the core.
//
// Every entry goes through `enter`: no exception crosses the ABI, calls from inside a callback of the host's or a
// forked child are refused, and one call runs at a time per engine.
#include <cstddef>
#include <cstring>
#include <new>

#include "core/engine.h"

struct strata_engine {
  std::unique_ptr<strata::Engine> impl;
};

namespace {

using strata::Engine;
using strata::Status;

thread_local std::string last_error;

strata_status finish(const Status& status) {
  if (!status.ok()) last_error = status.text();
  return status.code();
}

template <class Fn>
strata_status guarded(Fn fn) {
  try {
    return finish(fn());
  } catch (const std::bad_alloc&) {
    return finish({STRATA_RESOURCE_EXHAUSTED, "out of memory"});
  } catch (const std::exception& e) {
    return finish({STRATA_INTERNAL, std::string("unexpected exception: ") + e.what()});
  } catch (...) {
    return finish({STRATA_INTERNAL, "unexpected exception"});
  }
}

// A callback of the host's runs under an engine's lock, and the engine is in the middle of something.
Status not_from_callback() {
  const char* const callback = strata::HostCallback::running();
  if (!callback) return strata::Ok();
  return {STRATA_FAILED_PRECONDITION, std::string("an engine function was called from inside ") + callback};
}

template <class Fn>
strata_status enter(const strata_engine* engine, Fn fn) {
  return guarded([&]() -> Status {
    if (!engine) return {STRATA_INVALID_ARGUMENT, "the engine is NULL"};
    if (engine->impl->is_forked_child()) {
      return {STRATA_FAILED_PRECONDITION, "this engine belongs to the parent process; open one after the fork"};
    }
    STRATA_RETURN_IF_ERROR(not_from_callback());
    std::lock_guard lock(engine->impl->mutex());
    return fn(*engine->impl);
  });
}

Status missing(const char* what) { return {STRATA_INVALID_ARGUMENT, std::string(what) + " is NULL"}; }

// Size of a struct as it was first published. A struct that grows gets its old size here.
template <class T>
constexpr uint32_t kFirstSize = sizeof(T);
template <>
constexpr uint32_t kFirstSize<strata_engine_args> = offsetof(strata_engine_args, gradient_memory);
template <>
constexpr uint32_t kFirstSize<strata_step_args> = offsetof(strata_step_args, max_norm);

// A caller's struct, read as far as it goes; fields beyond its size are zero.
template <class T>
Status take(const T* given, T* out) {
  if (given->struct_size < kFirstSize<T> || given->struct_size % alignof(T) != 0) {
    return {STRATA_INVALID_ARGUMENT, "struct_size " + std::to_string(given->struct_size) +
                                         " is that of no version of this struct, the first has " +
                                         std::to_string(kFirstSize<T>) + " bytes (use STRATA_INIT)"};
  }
  std::memset(static_cast<void*>(out), 0, sizeof(T));
  std::memcpy(static_cast<void*>(out), given, std::min<size_t>(given->struct_size, sizeof(T)));
  return strata::Ok();
}

// More than any host has of anything: a count above it was never set, or is of another type.
constexpr uint64_t kMostItems = 1u << 24;

Status check_count(uint64_t count, const char* name) {
  if (count <= kMostItems) return strata::Ok();
  return {STRATA_INVALID_ARGUMENT, std::string(name) + " is " + std::to_string(count) + ", more than " +
                                       std::to_string(kMostItems) + ": was it set?"};
}

// The structs of an array, which lie the first one's struct_size apart. Room is made as they turn out to be there.
template <class T>
Status take_all(const T* given, uint64_t count, std::vector<T>* out) {
  STRATA_RETURN_IF_ERROR(check_count(count, "count"));
  for (uint64_t i = 0; i < count; ++i) {
    const auto* item = reinterpret_cast<const T*>(reinterpret_cast<const char*>(given) + i * given->struct_size);
    T whole;
    STRATA_RETURN_IF_ERROR(take(item, &whole).during("item " + std::to_string(i)));
    out->push_back(whole);
  }
  return strata::Ok();
}

// Fills a caller's struct as far as it goes.
template <class T, class Fn>
Status give(T* caller, Fn fill) {
  if (!caller) return missing("out");
  T whole;
  STRATA_RETURN_IF_ERROR(take(caller, &whole));
  const uint32_t size = caller->struct_size;
  Status status = fill(&whole);
  whole.struct_size = size;
  std::memcpy(static_cast<void*>(caller), &whole, std::min<size_t>(size, sizeof(T)));
  return status;
}

}  // namespace

extern "C" {

void strata_init_struct(void* p, uint32_t struct_size) {
  std::memset(p, 0, struct_size);
  std::memcpy(p, &struct_size, sizeof(struct_size));
}

const char* strata_last_error(void) { return last_error.c_str(); }
const char* strata_status_name(strata_status code) { return strata::status_name(code); }
const char* strata_version(void) { return STRATA_VERSION; }

strata_status strata_open(const strata_engine_args* args, strata_engine** out) {
  return guarded([&]() -> Status {
    if (!args || !out) return missing(args ? "out" : "args");
    *out = nullptr;
    STRATA_RETURN_IF_ERROR(not_from_callback());
    strata_engine_args whole;
    STRATA_RETURN_IF_ERROR(take(args, &whole));
    STRATA_RETURN_IF_ERROR(check_count(whole.override_count, "override_count"));
    auto engine = std::make_unique<strata_engine>();
    STRATA_RETURN_IF_ERROR(Engine::open(whole, &engine->impl));
    *out = engine.release();
    return strata::Ok();
  });
}

void strata_close(strata_engine* engine) {
  if (finish(not_from_callback()) != STRATA_OK) return;
  // A forked child has the memory but not the threads: it leaves the engine to its parent.
  if (engine && engine->impl->is_forked_child()) return;
  delete engine;
}

int32_t strata_rank(const strata_engine* engine) { return engine ? engine->impl->places().world.rank : 0; }
int32_t strata_world(const strata_engine* engine) { return engine ? engine->impl->places().world.size : 0; }

strata_status strata_get_ranks(const strata_engine* engine, strata_ranks* out) {
  return guarded([&]() -> Status {
    if (!engine) return {STRATA_INVALID_ARGUMENT, "the engine is NULL"};
    return give(out, [&](strata_ranks* r) {
      const strata::Places& p = engine->impl->places();
      *r = {r->struct_size, r->abi_minor,  p.world.rank,  p.world.size,    p.data.rank,
            p.data.size,    p.tensor.rank, p.tensor.size, p.pipeline.rank, p.pipeline.size};
      return strata::Ok();
    });
  });
}

strata_status strata_add_group(strata_engine* engine, const strata_group_args* args, strata_group* out) {
  return enter(engine, [&](Engine& e) -> Status {
    if (!args || !out) return missing(args ? "out" : "args");
    strata_group_args whole;
    STRATA_RETURN_IF_ERROR(take(args, &whole));
    return e.add_group(whole, out);
  });
}

strata_status strata_add_unit(strata_engine* engine, const char* name, strata_unit* out) {
  return enter(engine, [&](Engine& e) { return out ? e.add_unit(name, out) : missing("out"); });
}

strata_status strata_add_param(strata_engine* engine, strata_unit unit, const strata_param_args* args,
                               strata_param* out) {
  return enter(engine, [&](Engine& e) -> Status {
    if (!args || !out) return missing(args ? "out" : "args");
    strata_param_args whole;
    STRATA_RETURN_IF_ERROR(take(args, &whole));
    return e.add_param(unit, whole, out);
  });
}

strata_status strata_commit(strata_engine* engine) {
  return enter(engine, [](Engine& e) { return e.commit(); });
}

strata_status strata_write_param(strata_engine* engine, strata_param param, const strata_tensor* value, int32_t root) {
  return enter(engine, [&](Engine& e) -> Status {
    if (!value) return e.write_param(param, nullptr, root);
    strata_tensor whole;
    STRATA_RETURN_IF_ERROR(take(value, &whole));
    return e.write_param(param, &whole, root);
  });
}

strata_status strata_read_param(strata_engine* engine, strata_param param, const char* array,
                                const strata_tensor* out) {
  return enter(engine, [&](Engine& e) -> Status {
    if (!out) return missing("out");
    strata_tensor whole;
    STRATA_RETURN_IF_ERROR(take(out, &whole));
    return e.read_param(param, array, whole);
  });
}

strata_status strata_fetch(strata_engine* engine, strata_unit unit, const strata_stream* stream) {
  return enter(engine, [&](Engine& e) { return e.fetch(unit, stream); });
}

strata_status strata_release(strata_engine* engine, strata_unit unit, const strata_stream* stream) {
  return enter(engine, [&](Engine& e) { return e.release(unit, stream); });
}

strata_status strata_param_view(strata_engine* engine, strata_param param, strata_tensor* out) {
  return enter(engine, [&](Engine& e) { return give(out, [&](strata_tensor* t) { return e.view(param, t); }); });
}

strata_status strata_unit_views(strata_engine* engine, strata_unit unit, strata_tensor* out, uint64_t capacity,
                                uint64_t* count) {
  return enter(engine, [&](Engine& e) -> Status {
    if (!count || (capacity > 0 && !out)) return missing(count ? "out" : "count");
    const std::vector<uint32_t>* params = nullptr;
    STRATA_RETURN_IF_ERROR(e.params_of(unit, &params));
    *count = params->size();
    const uint64_t stride = capacity > 0 ? out->struct_size : 0;
    for (uint64_t i = 0; i < std::min<uint64_t>(capacity, params->size()); ++i) {
      auto* item = reinterpret_cast<strata_tensor*>(reinterpret_cast<char*>(out) + i * stride);
      STRATA_RETURN_IF_ERROR(give(item, [&](strata_tensor* t) { return e.view((*params)[i], t); }));
    }
    return strata::Ok();
  });
}

strata_status strata_grad(strata_engine* engine, strata_param param, const strata_tensor* grad,
                          const strata_stream* stream) {
  return strata_grads(engine, &param, grad, 1, stream);
}

strata_status strata_grads(strata_engine* engine, const strata_param* params, const strata_tensor* grads,
                           uint64_t count, const strata_stream* stream) {
  return enter(engine, [&](Engine& e) -> Status {
    if (count > 0 && (!params || !grads)) return missing(params ? "grad" : "params");
    std::vector<strata_tensor> whole;
    STRATA_RETURN_IF_ERROR(take_all(grads, count, &whole));
    return e.grads(params, whole, stream);
  });
}

strata_status strata_grads_done(strata_engine* engine, strata_unit unit) {
  return enter(engine, [&](Engine& e) { return e.grads_done(unit); });
}

strata_status strata_end_backward(strata_engine* engine) {
  return enter(engine, [](Engine& e) { return e.end_backward(); });
}

strata_status strata_drop_gradients(strata_engine* engine) {
  return enter(engine, [](Engine& e) { return e.drop_gradients(); });
}

strata_status strata_step(strata_engine* engine, const strata_step_args* args) {
  return enter(engine, [&](Engine& e) -> Status {
    if (!args) return e.step(nullptr);
    strata_step_args whole;
    STRATA_RETURN_IF_ERROR(take(args, &whole));
    if (whole.group_lr || whole.groups) STRATA_RETURN_IF_ERROR(e.check_group_count(whole.group_count));
    std::vector<strata_group_args> groups;
    if (whole.groups) STRATA_RETURN_IF_ERROR(take_all(whole.groups, whole.group_count, &groups).during("groups"));
    whole.groups = whole.groups ? groups.data() : nullptr;
    return e.step(&whole);
  });
}

strata_status strata_fail(strata_engine* engine, const char* text) {
  return enter(engine, [&](Engine& e) { return text ? e.fail({STRATA_ABORTED, text}) : missing("text"); });
}

strata_status strata_wait(strata_engine* engine) {
  return enter(engine, [](Engine& e) { return e.wait(); });
}

strata_status strata_get_step_info(strata_engine* engine, strata_step_info* out) {
  return enter(engine, [&](Engine& e) { return give(out, [&](strata_step_info* i) { return e.step_info(i); }); });
}

strata_status strata_get_counters(strata_engine* engine, strata_counter_span span, strata_counters* out) {
  return enter(engine, [&](Engine& e) { return give(out, [&](strata_counters* c) { return e.counters(span, c); }); });
}

strata_status strata_get_plan(strata_engine* engine, strata_plan_item* items, uint64_t capacity, uint64_t* count) {
  return enter(engine, [&](Engine& e) -> Status {
    if (!count || (capacity > 0 && !items)) return missing(count ? "items" : "count");
    return e.plan(items, capacity, count);
  });
}

strata_status strata_get_device(strata_engine* engine, strata_device_info* out) {
  return enter(engine, [&](Engine& e) { return give(out, [&](strata_device_info* i) { return e.device_info(i); }); });
}

strata_status strata_get_setting(strata_engine* engine, const char* key, const char** value) {
  return enter(engine, [&](Engine& e) { return key && value ? e.setting(key, value) : missing("key or value"); });
}

strata_status strata_get_plugin_interface(strata_engine* engine, const char* role, const char* id, const void** table) {
  return enter(engine, [&](Engine& e) {
    return role && id && table ? e.plugin_interface(role, id, table) : missing("role, id or table");
  });
}

strata_status strata_save(strata_engine* engine, const char* root, const char* tag) {
  return enter(engine, [&](Engine& e) { return e.save(root, tag); });
}

strata_status strata_load(strata_engine* engine, const char* root, const char* tag) {
  return enter(engine, [&](Engine& e) { return e.load(root, tag); });
}

strata_status strata_export_weights(strata_engine* engine, const char* path) {
  return enter(engine, [&](Engine& e) { return e.export_weights(path); });
}

strata_status strata_set_meta(strata_engine* engine, const char* key, const char* value) {
  return enter(engine, [&](Engine& e) { return e.set_meta(key, value); });
}

strata_status strata_get_meta(strata_engine* engine, const char* key, const char** value) {
  return enter(engine, [&](Engine& e) { return value ? e.get_meta(key, value) : missing("value"); });
}

}  // extern "C"
