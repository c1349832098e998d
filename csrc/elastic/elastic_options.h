// What a process says of itself and of the job that it joins. A value.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "elastic/admission.h"
#include "elastic/job_store.h"
#include "elastic/listed_store.h"
#include "elastic/proposal.h"
#include "net/socket_address.h"

namespace torchft_ext {

// How a generation's failure says that its view is over, and that nothing else was wrong with it.
inline constexpr const char* kAnotherView = "the members decide on another view";

struct ElasticOptions {
  std::string job;  // for messages
  int size = 1;     // of the first view
  ElasticRules rules;
  SocketAddress bind_address;  // where to listen; its port is ignored
  PortRange ports;
  Duration limit = std::chrono::seconds(5);  // a member that is silent for so long is left out
  ComparingStoreFactory store;               // empty: the job has none, and is found by `listed`
  std::string prefix;                        // of the job's keys in it
  // Where members are looked for, instead of in the store, which is then the witness alone; the key
  // is what who comes there has to know. Empty: not so.
  ListedAddresses listed;
  std::string key;
  // After a view whose members could not connect: see elastic/admission.h.
  Duration backoff = Admission::kBackoff;
  // A view is over: its generations have to fail. On a thread of the member's own; may block.
  std::function<void(uint64_t view, const std::string& why)> on_stopped;
  // For those who ask how the job is: whom this process's operations wait for, each in a clause. On
  // the member's loop; must not block. Empty: nothing is told of them.
  std::function<std::vector<std::string>()> waits;
};

}  // namespace torchft_ext
