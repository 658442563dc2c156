// `fault` around every other interface: calls pass through unchanged, rules hit, bytes are counted as declared.
#include "fault_fixture.h"
#include "strata/iface/checkpoint.h"
#include "strata/iface/collective.h"
#include "strata/iface/device.h"
#include "strata/iface/optimizer.h"

namespace strata::test {
namespace {

using std::string;
using testing::HasSubstr;

template <class Api, class Handle>
class Wrapped {
 public:
  Wrapped(const char* interface_id, const string& wraps, const string& rules, const string& tag)
      : rank_({{"fault", {{"wraps", wraps}, {"rules", rules}, {"tag", tag}}}}) {
    const Status status = rank_.open(interface_id, &api, &self);
    EXPECT_TRUE(status.ok()) << status.text();
  }
  ~Wrapped() { api->close(self); }
  const Api* api = nullptr;
  Handle* self = nullptr;

 private:
  FaultRank rank_;
};

TEST(FaultDevice, WrapsEverySlot) {
  const string tag = unique("tag");
  Wrapped<strata_device_api, strata_device> d(STRATA_DEVICE, "device_host",
                                              "alloc:2:fail=RESOURCE_EXHAUSTED, square_sums:1:fail", tag);
  strata_device_caps caps{};
  caps.struct_size = sizeof(caps);
  ASSERT_EQ(d.api->caps(d.self, &caps), STRATA_OK);
  EXPECT_EQ(caps.type, STRATA_CPU);
  void *p = nullptr, *q = nullptr;
  ASSERT_EQ(d.api->alloc(d.self, 8192, &p), STRATA_OK);
  EXPECT_EQ(d.api->alloc(d.self, 8192, &q), STRATA_RESOURCE_EXHAUSTED);
  EXPECT_EQ(d.api->alloc_pinned(d.self, 4096, &q), STRATA_UNIMPLEMENTED) << "the host's default, passed through";
  d.api->free_pinned(d.self, nullptr);

  strata_stream stream{};
  stream.struct_size = sizeof(stream);
  ASSERT_EQ(d.api->stream_create(d.self, 0, &stream), STRATA_OK);
  EXPECT_EQ(stream.domain, STRATA_CPU);
  float* x = static_cast<float*>(p);
  std::vector<float> ones(2048, 1.0f);
  std::vector<uint16_t> half(2048);
  EXPECT_EQ(d.api->fill(d.self, x, 0, 8192, &stream), STRATA_OK);
  EXPECT_EQ(d.api->copy(d.self, x, ones.data(), 8192, &stream), STRATA_OK);
  EXPECT_EQ(d.api->cast(d.self, half.data(), STRATA_BF16, x, STRATA_F32, 2048, STRATA_ROUND_AWAY, &stream), STRATA_OK);
  EXPECT_EQ(d.api->accumulate(d.self, x, half.data(), STRATA_BF16, 2048, &stream), STRATA_OK);
  EXPECT_EQ(x[2047], 2.0f);
  double sum = 0;
  EXPECT_EQ(d.api->square_sums(d.self, x, STRATA_F32, 2048, &sum, &stream), STRATA_INTERNAL);
  EXPECT_EQ(d.api->square_sums(d.self, x, STRATA_F32, 2048, &sum, &stream), STRATA_OK);
  EXPECT_EQ(sum, 8192.0);
  int64_t index = 0;
  EXPECT_EQ(d.api->find_nonfinite(d.self, x, STRATA_F32, 2048, &index, &stream), STRATA_OK);
  EXPECT_EQ(index, -1);
  EXPECT_EQ(d.api->stream_wait_host(d.self, &stream), STRATA_OK);
  strata_marker* marker = nullptr;
  EXPECT_EQ(d.api->marker_create(d.self, &marker), STRATA_OK);
  EXPECT_EQ(d.api->marker_record(d.self, marker, &stream), STRATA_OK);
  EXPECT_EQ(d.api->stream_wait_marker(d.self, &stream, marker), STRATA_OK);
  EXPECT_EQ(d.api->marker_wait_host(d.self, marker), STRATA_OK);
  d.api->marker_destroy(d.self, marker);
  Event event = Event::create();
  EXPECT_EQ(d.api->stream_record(d.self, &stream, event.get()), STRATA_OK);
  EXPECT_TRUE(event->is_set());
  d.api->stream_destroy(d.self, &stream);
  d.api->free(d.self, p);

  const std::pair<const char*, uint64_t> bytes[] = {
      {"alloc", 16384}, {"alloc_pinned", 4096}, {"fill", 8192},         {"copy", 8192},
      {"cast", 4096},   {"accumulate", 4096},   {"square_sums", 16384}, {"find_nonfinite", 8192}};
  for (auto [op, n] : bytes) EXPECT_EQ(control()->bytes_seen(tag.c_str(), 0, op), n) << op;
}

// The event that the caller waits for ends with the words of the wrapped plugin, not with fault's.
TEST(FaultCollective, PassesOnTheStatusAndTextOfAnEventThatFails) {
  Wrapped<strata_collective_api, strata_comm> c(STRATA_COLLECTIVE, "late_failure", "all_gather:1:late=1",
                                                unique("tag"));
  strata_coll_args args{};
  args.struct_size = sizeof(args);
  args.label = "gather layer3";
  args.deadline_ns = -1;
  for (const char* call : {"late", "passed on at once"}) {
    Event done = Event::create();
    ASSERT_EQ(c.api->all_gather(c.self, &args, done.get()), STRATA_OK);
    const Status status = done->wait(std::chrono::seconds(10));
    EXPECT_EQ(status.code(), STRATA_UNAVAILABLE) << call;
    EXPECT_EQ(status.text(), "late_failure: gather layer3: the wire was cut") << call;
  }
}

TEST(HostSync, SetFromTakesStatusAndTextAndOnlyOnce) {
  Host host([](strata_log_level, const string&, const string&) {}, STRATA_LOG_DEBUG, 1);
  const auto* sync = static_cast<const strata_sync_api*>(host.c()->get_interface(host.c()->ctx, STRATA_HOST_SYNC));
  ASSERT_TRUE(STRATA_HAS(sync, strata_sync_api, set_from));
  Event source = Event::create(), first = Event::create(), second = Event::create();
  sync->set_from(first.get(), source.get());  // too early: the caller has not waited
  EXPECT_EQ(first->wait({}).code(), STRATA_DEADLINE_EXCEEDED);
  sync->set(source.get(), STRATA_DATA_LOSS, "block 7");
  sync->set_from(second.get(), source.get());
  sync->set_from(first.get(), source.get());
  EXPECT_EQ(second->wait({}).code(), STRATA_DATA_LOSS);
  EXPECT_EQ(second->wait({}).text(), "block 7");
  EXPECT_EQ(first->wait({}).code(), STRATA_DEADLINE_EXCEEDED) << "a second set is ignored";
}

TEST(FaultCollective, HoldsTheCompletionAndCountsOutputBytes) {
  const string tag = unique("tag"), gate = unique("gate");
  Wrapped<strata_collective_api, strata_comm> c(STRATA_COLLECTIVE, "null",
                                                "all_gather:1:hold=" + gate + ", all_reduce:2:fail=ABORTED", tag);
  strata_collective_caps caps{};
  caps.struct_size = sizeof(caps);
  ASSERT_EQ(c.api->caps(c.self, &caps), STRATA_OK);
  EXPECT_EQ(caps.world, 1);
  void* memory = nullptr;
  ASSERT_EQ(c.api->alloc(c.self, 4096, &memory), STRATA_OK);
  float in[4] = {1, 2, 3, 4};
  const strata_coll_item item{sizeof(item), STRATA_ABI_MINOR, in, memory, 4, STRATA_F32, STRATA_F32};
  strata_coll_args args{};
  args.struct_size = sizeof(args);
  args.items = &item;
  args.item_count = 1;
  args.item_stride = sizeof(item);
  args.label = "gather layer3";
  args.deadline_ns = -1;

  Event done = Event::create();
  ASSERT_EQ(c.api->all_gather(c.self, &args, done.get()), STRATA_OK);
  ASSERT_TRUE(eventually([&] { return control()->waiting(gate.c_str()) == 1; }));
  EXPECT_FALSE(done->is_set());
  EXPECT_EQ(static_cast<float*>(memory)[3], 4) << "passed on at once: ranks launch collectives in one order";
  EXPECT_EQ(c.api->all_reduce(c.self, &args, nullptr), STRATA_OK);
  control()->open_gate(gate.c_str());
  EXPECT_TRUE(done->wait(std::chrono::seconds(10)).ok());

  EXPECT_EQ(c.api->all_reduce(c.self, &args, nullptr), STRATA_ABORTED);
  EXPECT_EQ(c.api->reduce_scatter(c.self, &args, nullptr), STRATA_OK);
  EXPECT_EQ(c.api->broadcast(c.self, &args, nullptr), STRATA_OK);
  EXPECT_EQ(c.api->all_to_all(c.self, &args, nullptr), STRATA_OK);
  EXPECT_EQ(c.api->barrier(c.self, &args), STRATA_OK);
  for (auto [op, bytes] : {std::pair<const char*, uint64_t>{"all_gather", 16},
                           {"all_reduce", 32},
                           {"broadcast", 16},
                           {"reduce_scatter", 16},
                           {"all_to_all", 16},
                           {"collective.alloc", 4096}}) {
    EXPECT_EQ(control()->bytes_seen(tag.c_str(), 0, op), bytes) << op;
  }
  c.api->abort(c.self, STRATA_CANCELLED, "the test ends");
  EXPECT_EQ(c.api->barrier(c.self, &args), STRATA_CANCELLED);
  EXPECT_THAT(reason(STRATA_CANCELLED), HasSubstr("the test ends")) << "the wrapped plugin's text arrives";
  c.api->free(c.self, memory);
}

TEST(FaultOptimizer, HoldsAStepUntilItsGateOpens) {
  const string tag = unique("tag"), gate = unique("gate");
  Wrapped<strata_optimizer_api, strata_optim> o(STRATA_OPTIMIZER, "null",
                                                "optimizer.step:2:hold=" + gate + ", scalars:1:fail=OUT_OF_RANGE", tag);
  strata_optim_layout layout{};
  layout.struct_size = sizeof(layout);
  ASSERT_EQ(o.api->layout(o.self, STRATA_BF16, &layout), STRATA_OK);
  EXPECT_EQ(layout.array_count, 0u);
  float scalars[STRATA_OPTIM_SCALARS];
  strata_optim_group group{};
  EXPECT_EQ(o.api->scalars(o.self, &group, 1, scalars), STRATA_OUT_OF_RANGE);
  EXPECT_EQ(o.api->scalars(o.self, &group, 1, scalars), STRATA_OK);

  uint16_t weight[8] = {0x3F80, 0x3F80, 0x4000};
  const strata_optim_span spans[] = {{0, 3, 0, 0}, {4, 2, 0, 0}};
  strata_optim_args args{};
  args.struct_size = sizeof(args);
  args.spans = spans;
  args.span_count = 2;
  args.span_stride = sizeof(spans[0]);
  args.weight = weight;
  args.weight_dtype = STRATA_BF16;
  EXPECT_EQ(o.api->step(o.self, &args, nullptr), STRATA_OK);
  Event held = Event::create(), free = Event::create();
  {
    strata_stream stream{sizeof(stream), STRATA_ABI_MINOR, STRATA_CPU, 0, nullptr};
    strata_optim_args short_lived = args;
    short_lived.stream = &stream;
    ASSERT_EQ(o.api->step(o.self, &short_lived, held.get()), STRATA_OK);
    short_lived = {};
  }
  ASSERT_TRUE(eventually([&] { return control()->waiting(gate.c_str()) == 1; }));
  ASSERT_EQ(o.api->step(o.self, &args, free.get()), STRATA_OK);
  EXPECT_TRUE(free->wait(std::chrono::seconds(10)).ok()) << "a later step passes";
  EXPECT_FALSE(held->is_set());
  control()->open_gate(gate.c_str());
  EXPECT_TRUE(held->wait(std::chrono::seconds(10)).ok());

  float master[3] = {};
  args.span_count = 1;
  EXPECT_EQ(o.api->export_array(o.self, &args, 0, master), STRATA_OK);
  EXPECT_EQ(master[2], 2.0f);
  EXPECT_EQ(o.api->import_array(o.self, &args, 0, master), STRATA_OK);
  EXPECT_EQ(control()->bytes_seen(tag.c_str(), 0, "step"), 3u * 5 * 2);
  EXPECT_EQ(control()->bytes_seen(tag.c_str(), 0, "export_array"), 12u);
  EXPECT_EQ(control()->count(tag.c_str(), 0, "import_array"), 1u);
}

TEST(FaultCheckpoint, AFailedCommitFreesItsSave) {
  const string tag = unique("tag");
  Wrapped<strata_checkpoint_api, strata_ckpt> c(STRATA_CHECKPOINT, "null",
                                                "checkpoint.write:2:fail=RESOURCE_EXHAUSTED, commit:1:fail", tag);
  strata_ckpt_save_args args{};
  args.struct_size = sizeof(args);
  strata_ckpt_save* save = nullptr;
  ASSERT_EQ(c.api->write(c.self, &args, &save), STRATA_OK);
  EXPECT_EQ(c.api->commit(c.self, save), STRATA_INTERNAL);  // the leak checker sees whether the save is gone
  EXPECT_EQ(c.api->write(c.self, &args, &save), STRATA_RESOURCE_EXHAUSTED);
  ASSERT_EQ(c.api->write(c.self, &args, &save), STRATA_OK);
  EXPECT_EQ(c.api->commit(c.self, save), STRATA_OK);
  save = nullptr;
  ASSERT_EQ(c.api->export_weights(c.self, &args, 0, &save), STRATA_OK);
  ASSERT_EQ(c.api->export_weights(c.self, &args, 1, &save), STRATA_OK);
  c.api->abandon(c.self, save);
  EXPECT_EQ(c.api->may_replace(c.self, "/nowhere", "t"), STRATA_OK);
  strata_ckpt_load* load = nullptr;
  EXPECT_EQ(c.api->load_open(c.self, "/nowhere", nullptr, &load), STRATA_NOT_FOUND);
  EXPECT_THAT(reason(STRATA_NOT_FOUND), HasSubstr("/nowhere"));
}

}  // namespace
}  // namespace strata::test
