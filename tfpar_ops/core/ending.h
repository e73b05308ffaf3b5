// Ending a process that cannot end itself, because a call that never returns keeps Python's lock.
#ifndef TFPAR_OPS_CORE_ENDING_H_
#define TFPAR_OPS_CORE_ENDING_H_

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

// Waits in a thread of its own for a line on the descriptor `fd`, which it owns from here on. Then it writes the line
// to standard error and ends the process with exit code `code`, without any clean-up. Where `fd` ends before a whole
// line has come, nothing happens. Returns 0, or an error number of pthread_create.
int tfpar_end_on_message(int fd, int code);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif

#endif  // TFPAR_OPS_CORE_ENDING_H_
