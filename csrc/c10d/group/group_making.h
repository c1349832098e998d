// Makes groups: engine, backend, first generation, and the group object around them.
//
// Threads: any. Both block until the first generation stands, up to the timeout, without the GIL; a
// signal's handler may throw out of them. They raise what configure() raises and what makeEngine()
// raises: the other members are told either way.
#pragma once

#include "c10d/group/ft_backend.h"
#include "c10d/group/ft_process_group.h"
#include "c10d/group/group_spec.h"

namespace torchft_ext {

c10::intrusive_ptr<FtBackend> makeBackend(const GroupSpec& spec);
// A group that torch's tables do not know: it needs no init_process_group(). It serves every device
// type that its engine does. The caller owns it. Its end says goodbye if it is idle and on host
// memory; shutdown() always does.
ProcessGroupPtr makeGroup(const GroupSpec& spec);

}  // namespace torchft_ext
