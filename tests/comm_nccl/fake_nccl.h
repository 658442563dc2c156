// fake_nccl.h - how a test tells the fake NCCL to misbehave, and asks what was called. The library is one of the
// process: every instance that was given its path.
#pragma once

#include <string>

namespace fake {

// "version": what ncclGetVersion says. "alone": ranks do not meet; a collective ends at once and moves nothing (ranks
// that are processes). "hang": collectives begun from now on end only by an abort. "hang_init", "hang_abort": those
// calls never return. "fail": the next group fails. "async_error": what a communicator says of itself. "no_memory":
// ncclMemAlloc fails. Zero is the ordinary course.
using Set = void (*)(const char* what, int value);
// "groups", "aborts", "destroys", "registrations" (those not undone), "communicators" (not ended).
using Get = int (*)(const char* what);

}  // namespace fake
