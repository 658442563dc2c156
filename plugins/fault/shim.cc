#include "shim.h"

#include <algorithm>

namespace strata::fault {
namespace {

using plugin_kit::host_interface;
using plugin_kit::status_name;
using std::chrono::steady_clock;

}  // namespace

strata_status Shim::start(const Interface& interface, const strata_open_args* args, const void** table,
                          strata_open_args* inner_args) {
  host_ = args->host;
  sync_ = host_interface<strata_sync_api>(host_, STRATA_HOST_SYNC);
  deadline_ns_ = args->deadline_ns;
  std::string wraps;
  if (strata_status code = read_options(interface, args, &wraps)) return code;
  return find_wrapped(interface, wraps, table, &inner_args->options);
}

strata_status Shim::read_options(const Interface& interface, const strata_open_args* args, std::string* wraps) {
  const plugin_kit::Options options(args->options);
  *wraps = options.text("wraps", "");
  hide_map_ = options.flag("hide_map", false);
  const std::string tag = options.text("tag", "");
  std::string error;
  if (!parse_rules(options.text("rules", ""), &rules_, &error)) {
    return plugin_kit::fail(host_, STRATA_INVALID_ARGUMENT, "fault: option rules: " + error);
  }
  for (const Op& op : interface.ops) {
    OpState& state = ops_[op.name];
    state.counter = &Registry::instance().counter(tag, args->rank, interface.name, op.name);
    for (const Rule& rule : rules_) {
      const bool names_it = rule.op == op.name && (rule.interface.empty() || rule.interface == interface.name);
      const bool can = (rule.kind != Kind::kFail || op.returns_status) && (rule.kind != Kind::kShort || op.moves_bytes);
      if (names_it && can) state.rules.push_back(&rule);
    }
  }
  return STRATA_OK;
}

strata_status Shim::find_wrapped(const Interface& interface, const std::string& wraps, const void** table,
                                 const strata_options** options) {
  auto* plugins = host_interface<strata_plugins_api>(host_, STRATA_HOST_PLUGINS);
  if (!plugins)
    return plugin_kit::fail(host_, STRATA_FAILED_PRECONDITION, "fault: the host lacks " STRATA_HOST_PLUGINS);
  strata_status code =
      plugin_kit::fail(host_, STRATA_INVALID_ARGUMENT, "fault: option wraps is empty: name the plugin to wrap");
  for (size_t begin = 0; begin < wraps.size();) {
    const size_t end = std::min(wraps.find(',', begin), wraps.size());
    wrapped_ = wraps.substr(begin, end - begin);
    wrapped_.erase(std::remove(wrapped_.begin(), wrapped_.end(), ' '), wrapped_.end());
    begin = end + 1;
    if (wrapped_ == "fault") {
      return plugin_kit::fail(host_, STRATA_INVALID_ARGUMENT, "fault: option wraps names fault itself");
    }
    code = plugins->find(host_->ctx, wrapped_.c_str(), interface.id, table);
    if (code == STRATA_OK) return plugins->options(host_->ctx, wrapped_.c_str(), options);
  }
  return code;  // of the last one tried
}

void Shim::finish() {
  closing_ = true;
  Registry::instance().wake();
  std::lock_guard lock(helpers_mutex_);
  for (Helper& helper : helpers_) helper.thread.join();
  helpers_.clear();
}

Shim::Match Shim::enter(const char* op, uint64_t bytes) {
  OpState& state = ops_.find(std::string_view(op))->second;
  const uint64_t number = ++state.calls;
  ++state.counter->calls;
  state.counter->bytes += bytes;
  for (const Rule* rule : state.rules) {
    if (rule->first <= number && number <= rule->last) return {rule, op, number};
  }
  return {};
}

std::string Shim::describe(const Match& match) const {
  return "fault: " + std::string(match.op) + " call " + std::to_string(match.number) + " of " + wrapped_ + " (rule " +
         match.rule->text + ")";
}

Error Shim::apply(const Match& match) {
  const Rule& rule = *match.rule;
  if (rule.kind == Kind::kFail) return {rule.code, describe(match) + " fails with " + status_name(rule.code)};
  if (rule.kind == Kind::kShort) return {};

  // A steady_clock far ahead of now would overflow inside the wait, so "no deadline" is a year.
  const auto now = steady_clock::now();
  const auto deadline =
      now + (deadline_ns_ < 0 ? std::chrono::hours(24 * 365) : std::chrono::nanoseconds(deadline_ns_));
  Waited waited;
  if (rule.kind == Kind::kHold) {
    waited = Registry::instance().wait_gate(rule.gate, deadline, closing_);
  } else {
    const auto due = now + std::chrono::milliseconds(rule.late_ms);
    waited = Registry::instance().pause(std::min(due, deadline), closing_);
    if (waited == Waited::kPassed && due > deadline) waited = Waited::kTimedOut;
  }
  if (waited == Waited::kPassed) return {};
  if (waited == Waited::kCancelled) return {STRATA_CANCELLED, describe(match) + " was held when the plugin was closed"};
  return {STRATA_DEADLINE_EXCEEDED,
          describe(match) + " was held for " + std::to_string(deadline_ns_ / 1000000) + " ms, the deadline"};
}

strata_status Shim::pass_on(const Submit& inner, strata_event* done) {
  std::lock_guard lock(submit_mutex_);
  return inner(done);
}

strata_status Shim::defer(const char* op, uint64_t bytes, strata_event* done, Submit inner) noexcept {
  return transfer(op, bytes, done, std::move(inner), nullptr);
}

strata_status Shim::transfer(const char* op, uint64_t bytes, strata_event* done, Submit whole,
                             std::function<strata_status()> half) noexcept {
  return guarded([&]() -> strata_status {
    const Match match = enter(op, bytes);
    if (!match) return pass_on(whole, done);
    if (match.rule->kind == Kind::kShort) {
      if (strata_status code = pass_on([&](strata_event*) { return half(); }, nullptr)) return code;
      const Error lost(STRATA_DATA_LOSS, describe(match) + " moved half of its " + std::to_string(bytes) + " bytes");
      if (!done) return fail(lost);
      sync_->set(done, lost.code(), lost.text().c_str());
      return STRATA_OK;
    }
    if (!done || match.rule->kind == Kind::kFail) {
      const Error e = apply(match);
      return e.ok() ? pass_on(whole, done) : fail(e);
    }
    sync_->retain(done);
    in_background([this, match, done, whole = std::move(whole)] {
      Error e = apply(match);
      if (e.ok()) {
        strata_status code = pass_on(whole, done);
        // The queue may be full now: to the caller this call was accepted long ago.
        while (code == STRATA_AGAIN && !closing_) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
          code = pass_on(whole, done);
        }
        e = {code, describe(match) + " was refused with " + status_name(code) + " when it was passed on"};
      }
      if (!e.ok()) sync_->set(done, e.code(), e.text().c_str());
      sync_->release(done);
    });
    return STRATA_OK;
  });
}

strata_status Shim::complete(const char* op, uint64_t bytes, strata_event* done, Submit inner) noexcept {
  return guarded([&]() -> strata_status {
    const Match match = enter(op, bytes);
    if (!match) return pass_on(inner, done);
    if (!done || match.rule->kind == Kind::kFail) {
      const Error e = apply(match);
      return e.ok() ? pass_on(inner, done) : fail(e);
    }
    strata_event* own = sync_->create(host_->ctx);
    if (!own) return fail({STRATA_RESOURCE_EXHAUSTED, "fault: no memory for an event"});
    if (strata_status code = pass_on(inner, own)) {
      sync_->release(own);
      return code;
    }
    sync_->retain(done);
    in_background([this, match, done, own] {
      const Error e = apply(match);
      // The wrapped plugin ends its call within its own deadline, whatever came of the rule.
      const strata_status code = sync_->wait(own, -1);
      if (code == STRATA_OK) {
        sync_->set(done, e.code(), e.text().c_str());
      } else if (STRATA_HAS(sync_, strata_sync_api, set_from)) {
        sync_->set_from(done, own);
      } else {
        sync_->set(done, code, (describe(match) + " ended with " + status_name(code)).c_str());
      }
      sync_->release(own);
      sync_->release(done);
    });
    return STRATA_OK;
  });
}

void Shim::in_background(std::function<void()> work) {
  std::lock_guard lock(helpers_mutex_);
  for (auto helper = helpers_.begin(); helper != helpers_.end();) {
    if (helper->finished) {
      helper->thread.join();
      helper = helpers_.erase(helper);
    } else {
      ++helper;
    }
  }
  Helper& helper = helpers_.emplace_back();
  helper.thread = std::thread([&helper, work = std::move(work)] {
    work();
    helper.finished = true;
  });
}

}  // namespace strata::fault
