// The exceptions for failed generations and operations: one class for each kind of failure.
//
//   try {
//     comm.allreduce(data, count, DataType::kFloat32, Reduction::kSum).wait();
//   } catch (const torchft_ext::PeerLostError& error) {
//     std::cerr << "lost rank " << error.failure().cause.rank << "\n";
//     comm.configure(store, "job/2", new_rank, new_size);  // continue without it
//   } catch (const torchft_ext::CommError& error) { ... }  // any other kind
//
// Every thrown object is also a std::exception. With libtorch it is a c10::DistBackendError, and in
// a process with Python it becomes a Python exception of the same name. For this reason the classes
// below are not derived from std::exception themselves. Threads: any.
#pragma once

#include <utility>

#include "torchft_ext/failure.h"

namespace torchft_ext {

class CommError {
 public:
  virtual ~CommError();
  // failure().describe(), which is one line: without torch's frames, with libtorch too.
  virtual const char* what() const noexcept = 0;
  const Failure& failure() const noexcept { return *failure_; }
  // The same, to be kept. Never null.
  const FailurePtr& shared() const noexcept { return failure_; }

 protected:
  explicit CommError(FailurePtr failure) : failure_(std::move(failure)) {}
  CommError(const CommError&) = default;
  CommError& operator=(const CommError&) = default;

 private:
  FailurePtr failure_;
};

// A process died or froze: begin a generation without it.
class PeerLostError : public CommError {
 protected:
  using CommError::CommError;
};
// A process left cleanly before doing its part: begin a generation without it.
class PeerLeftError : public CommError {
 protected:
  using CommError::CommError;
};
// Two living processes cannot reach each other: begin a new generation.
class ConnectionLostError : public CommError {
 protected:
  using CommError::CommError;
};
// An operation or configure() ran past its deadline: begin a new generation.
class CommTimeoutError : public CommError {
 protected:
  using CommError::CommError;
};
// Somebody called abort(), or a signal came: begin a new generation.
class CommAbortedError : public CommError {
 protected:
  using CommError::CommError;
};
// The store cannot be reached: configure() with another one.
class StoreLostError : public CommError {
 protected:
  using CommError::CommError;
};
// Ranks issued different operations: fix the program, begin a new generation.
class MismatchError : public CommError {
 protected:
  using CommError::CommError;
};
// The generation could not be formed (a duplicate rank, a refused peer): see the message.
class RendezvousError : public CommError {
 protected:
  using CommError::CommError;
};

}  // namespace torchft_ext
