// An operation's place among its device's streams. Made by c10d/ for each operation on device
// memory, completed by its engine at issue, read by the Work.
//
// Owner: shared by operation, engine and Work. Threads: fields of the first group are the
// engine's once issued; those of the second are written by the issuing thread before issue()
// returns, then constant.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/operation.h"
#include "device/tensor_shelf.h"

namespace torchft_ext {

struct StreamSide : DeviceSide {
  explicit StreamSide(const c10::Stream& current) : current(current) {}

  // What the caller wants.
  const c10::Stream current;  // the caller's current stream at issue: what it waits for first
  bool on_current = false;    // run on `current` itself (async_op=False), not beside it
  bool timed = false;         // `start` is wanted too, with timing
  // The W inputs (reduce_scatter) or outputs (allgather) are one piece of memory of W equal parts,
  // in order, on every rank: one call of its library does. Said by the form that was called (the
  // _base ones), never found out from addresses: neighbours by chance on one rank only would pair
  // different calls.
  bool flat = false;
  // Enqueued on the operation's stream: ahead of it, behind what it waits for (contributions that
  // are not contiguous); behind it, before `end` (their results, poison). May be empty. Must only
  // enqueue. Called once at most, and gone then with what they hold.
  std::function<void(const c10::Stream&)> ahead;
  std::function<void(const c10::Stream&)> behind;
  // Asked when the operation has run: empty, or why its generation must fail. May be empty itself.
  // Must not block.
  std::function<std::string()> result_check;

  std::weak_ptr<TensorShelf> shelf;  // what the operation keeps until it is waited for; may be none

  // What the engine did. Empty where nothing was enqueued (the operation failed at once).
  std::optional<c10::Stream> stream;  // where it runs
  std::shared_ptr<c10::Event> start;
  std::shared_ptr<c10::Event> end;  // recorded behind it and `behind`
  // Whoever has had its stream wait for `end` may have the shelf released: nothing but the streams
  // stands between the operation and its end.
  bool may_release = false;
  bool captured = false;  // into a graph: nobody watches it, its state is complete at once
};

}  // namespace torchft_ext
