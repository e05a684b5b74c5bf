/* Statuses: what a failed call returns. Needs no Python and knows nothing of it.
 *
 * A status is named by an odd serial number, never by an address, so that one that is wrong or freed is noticed. They
 * are listed with the latest first, so that the usual search is short.
 */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kiln.h"

typedef struct Status {
  struct Status *next;
  uintptr_t serial;
  kiln_code code;
  char message[];
} Status;

static const uintptr_t UNDESCRIBED = 1; /* what cffi returns when even describing an error failed */
static pthread_mutex_t statuses_lock = PTHREAD_MUTEX_INITIALIZER;
static Status *statuses = NULL;
static uintptr_t last_serial = 1;

static kiln_status *new_status(kiln_code code, const char *message) {
  size_t length = strlen(message) + 1;
  Status *status = malloc(sizeof *status + length);
  if (status == NULL) return (kiln_status *)UNDESCRIBED;
  status->code = code;
  memcpy(status->message, message, length);
  pthread_mutex_lock(&statuses_lock);
  status->serial = last_serial += 2;
  status->next = statuses;
  statuses = status;
  uintptr_t serial = status->serial; /* once unlocked, another thread may free what it guesses */
  pthread_mutex_unlock(&statuses_lock);
  return (kiln_status *)serial;
}

static kiln_status *failure(kiln_code code, const char *format, ...) {
  char message[4096];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return new_status(code, message);
}

/* Where the list points to a status; to NULL if it is not there. The lock is held. */
static Status **find_status(const kiln_status *handle) {
  Status **place = &statuses;
  while (*place != NULL && (*place)->serial != (uintptr_t)handle) place = &(*place)->next;
  return place;
}

static kiln_code api_status_code(const kiln_status *handle) {
  if (handle == NULL) return KILN_OK;
  if ((uintptr_t)handle == UNDESCRIBED) return KILN_OUT_OF_MEMORY;
  pthread_mutex_lock(&statuses_lock);
  const Status *status = *find_status(handle);
  kiln_code code = status == NULL ? KILN_INVALID_HANDLE : status->code;
  pthread_mutex_unlock(&statuses_lock);
  return code;
}

static const char *api_status_message(const kiln_status *handle) {
  if (handle == NULL) return "";
  if ((uintptr_t)handle == UNDESCRIBED) return "memory ran out while an error was being described; see standard error";
  pthread_mutex_lock(&statuses_lock);
  const Status *status = *find_status(handle);
  const char *message = status == NULL ? "this is no status, or it was freed already" : status->message;
  pthread_mutex_unlock(&statuses_lock);
  return message;
}

static void api_status_free(kiln_status *handle) {
  pthread_mutex_lock(&statuses_lock);
  Status **place = find_status(handle);
  Status *status = *place;
  if (status != NULL) *place = status->next;
  pthread_mutex_unlock(&statuses_lock);
  free(status);
}
