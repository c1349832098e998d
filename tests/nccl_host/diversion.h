// Calls of one function made into calls of another, by a jump written over its beginning.
//
// Threads: while nobody is in the function yet. Throws std::runtime_error where that cannot be
// done: on another machine than x86-64, or where code may not be written.
#pragma once

namespace torchft_ext::nccl_host {

void divert(void* from, const void* to);

}  // namespace torchft_ext::nccl_host
