/* SPDX-License-Identifier: MIT
 *
 * strata/abi.h - version, calling convention, status codes, and the one rule of growth.
 *
 * The rule: every struct that crosses the ABI starts with `struct_size` and `abi_minor`, is only ever
 * appended to, and is read field by field with STRATA_HAS. Sizes are never compared for equality. A reader
 * ignores a tail it does not know; a missing tail means zero. Anything else is a new id: an
 * interface's next revision ("strata.offload/2"), or for the descriptor a new entry. See abi/RULES.md.
 *
 * Tags used on every function of these headers
 *   thread     [control]  one caller at a time per instance, from any OS thread
 *              [submit]   one caller at a time per instance; may run beside [control] of other instances
 *              [any]      any thread, concurrently
 *   state      [open] between a successful open and close   [committed] after strata_commit
 *   ownership  [call] borrowed for the call   [event] borrowed until the done event is set
 *              [self] owned by the callee until close   [give] handed over when the call returns STRATA_OK
 *              [static] lives as long as the process
 */
#ifndef STRATA_ABI_H
#define STRATA_ABI_H

#include <stddef.h>
#include <stdint.h>

#define STRATA_ABI_MAJOR 1u
#define STRATA_ABI_MINOR 0u

#if defined(_WIN32)
#define STRATA_CALL __cdecl
#define STRATA_EXPORT __declspec(dllexport)
#else
#define STRATA_CALL
#define STRATA_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
#define STRATA_EXTERN_C_BEGIN extern "C" {
#define STRATA_EXTERN_C_END }
#else
#define STRATA_EXTERN_C_BEGIN
#define STRATA_EXTERN_C_END
#endif

/* True when the struct behind `p` is long enough to hold `field`. The only way to read an appended field. */
#define STRATA_HAS(p, type, field) \
  ((size_t)(p)->struct_size >= offsetof(type, field) + sizeof((p)->field))

/* Status of a call. 0 to 16 are the gRPC codes with their usual meaning. An unknown code means INTERNAL. */
typedef int32_t strata_status;
enum {
  STRATA_OK = 0,
  STRATA_CANCELLED = 1,
  STRATA_UNKNOWN = 2,
  STRATA_INVALID_ARGUMENT = 3,
  STRATA_DEADLINE_EXCEEDED = 4,
  STRATA_NOT_FOUND = 5,
  STRATA_ALREADY_EXISTS = 6,
  STRATA_PERMISSION_DENIED = 7,
  STRATA_RESOURCE_EXHAUSTED = 8,
  STRATA_FAILED_PRECONDITION = 9,
  STRATA_ABORTED = 10,
  STRATA_OUT_OF_RANGE = 11,
  STRATA_UNIMPLEMENTED = 12,
  STRATA_INTERNAL = 13,
  STRATA_UNAVAILABLE = 14,
  STRATA_DATA_LOSS = 15,
  STRATA_UNAUTHENTICATED = 16,
  STRATA_AGAIN = 17 /* a submit found its queue full: call again; nothing was started */
};
/* Their names from 0 on, to make an array of: `const char *const names[] = {STRATA_STATUS_NAMES};` */
#define STRATA_STATUS_NAMES                                                                                  \
  "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",      \
      "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",           \
      "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED", "AGAIN"

#endif
