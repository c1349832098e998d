// What an engine needs of the communicator that it rides on. Such an engine has no sockets of its
// own: rendezvous, failure notices and goodbyes are those of another engine, whose communicator
// carries its control messages (tags with kEngineTag).
//
// HostCommunicator implements it, the NCCL engine takes it. Owner: the communicator that rides on
// it, and what ends that one's calls, which may be after the group's generation. Threads and what
// holds after the lifecycle failed: as of Communicator.
#pragma once

#include <functional>

#include "comm/communicator.h"

namespace torchft_ext {

class ControlCommunicator : public Communicator {
 public:
  // Called once for each member that says goodbye, and for those that have said it already: any
  // thread, not inside this call. It must not block. Operations of this communicator that need the
  // member fail anyway.
  using OnPeerLeft = std::function<void(int rank, bool begins_another)>;
  virtual void onPeerLeft(const OnPeerLeft& told) = 0;

  // Before the engine above ends anything that another member could take for data.
  // After the lifecycle failed: tells the other members, unless that has been done. True: all but
  // who is lost have it in their kernels. False: not by the deadline. Blocks; any thread but
  // the engine's own.
  virtual bool tellOfFailure(Deadline deadline) = 0;
  // Calls `then` once everything has been read that other members had told this one before this
  // call: on an engine thread, where it must not block. False: it is not called. Any thread.
  virtual bool whenNoticesRead(std::function<void()> then) = 0;
};

}  // namespace torchft_ext
