// One copy of the core library for each process. Two, such as one that a program links statically
// and a shared one beside it, would be two members of every generation under one process id.
//
// Every copy carries a note in its ELF file, by which it is found among the loaded objects however
// it was loaded, and a mark of its own that says whether it is in use. Any thread.
#pragma once

namespace torchft_ext {

// Takes the process for this copy. Throws std::logic_error where another one has it, as
// selfIncarnation() then does, and so whatever makes an engine or joins a job. The first time
// it looks at all loaded objects; later it costs a load. What it took lasts until exit or dlclose.
void requireSoleCopy();

}  // namespace torchft_ext
