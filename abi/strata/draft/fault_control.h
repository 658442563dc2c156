/* SPDX-License-Identifier: MIT
 *
 * strata/draft/fault_control.h - how a test drives the plugin `fault`: gates it opens, and counters it reads.
 *
 * A draft: tests of this repository use it, no promise goes with it.
 *
 * Gates and counters belong to the process, not to an instance, because a test has no handle of the instances the core
 * opens. Gates go by name, counters by the option `tag` of [plugin.fault] and the rank: choose both so that no other
 * test of the process uses them. Ranks that are processes have gates and counters each of their own.
 */
#ifndef STRATA_DRAFT_FAULT_CONTROL_H
#define STRATA_DRAFT_FAULT_CONTROL_H

#include "strata/abi.h"

STRATA_EXTERN_C_BEGIN

#define STRATA_FAULT_CONTROL "strata.fault.control/1"

typedef struct strata_fault_control_api {
  uint32_t struct_size;
  uint32_t abi_minor;

  /* A gate is closed until it is opened, and stays open until it is closed. Opening lets every held call go and
   * every later one pass. [any] */
  void(STRATA_CALL* open_gate)(const char* name);
  void(STRATA_CALL* close_gate)(const char* name);
  /* Calls held at this gate now. [any] */
  uint64_t(STRATA_CALL* waiting)(const char* name);

  /* Calls of slot `op` seen so far, failed and held ones included, by all instances of this tag and rank; they outlive
   * the instances. rank: as the instance was opened with; -1: all. `op` is a slot ("write": of every interface that has
   * it) or an interface and a slot ("offload.write"). Unknown names give 0. [any] */
  uint64_t(STRATA_CALL* count)(const char* tag, int32_t rank, const char* op);
  /* Bytes those calls asked for. device: bytes of alloc, copy, fill, what cast writes, what the others read;
   * offload: bytes of alloc, read, write; collective: bytes of alloc, and the output bytes of all items;
   * optimizer: bytes of weight in the spans of step, 4 per element of export_array and import_array;
   * checkpoint: 0. [any] */
  uint64_t(STRATA_CALL* bytes_seen)(const char* tag, int32_t rank, const char* op);
} strata_fault_control_api;

STRATA_EXTERN_C_END
#endif
