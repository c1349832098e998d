// What NCCL's ring kernels do with one collective on one channel, and with one transfer.
//
// Threads: the kernel's. All throw Aborted (kernel_link.h).
#pragma once

#include "device_layout.h"
#include "functions.h"

namespace torchft_ext::nccl_host {

void runCollective(const DeviceComm& comm, int channel, const Function& function,
                   const Collective& work);
void runSend(const DeviceComm& comm, int channel, const Transfer& work);
void runRecv(const DeviceComm& comm, int channel, const Transfer& work);

}  // namespace torchft_ext::nccl_host
