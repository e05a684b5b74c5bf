{{- define "kiln.name" -}}
{{- printf "%s-%s" .Release.Name (default .Chart.Name .Values.nameOverride) | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "kiln.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kiln.labels" -}}
{{ include "kiln.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "kiln.image" -}}
{{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end -}}

{{- /* Values that do not go together: said here, before anything is changed in the cluster. */ -}}
{{- define "kiln.check" -}}
{{- if not .Values.bundles }}{{ fail "bundles is empty; name at least one bundle to serve" }}{{ end }}
{{- if and .Values.registry.url .Values.claim }}{{ fail "registry.url and claim are both set; bundles come from one of them" }}{{ end }}
{{- if not (or .Values.registry.url .Values.claim) }}{{ fail "neither registry.url nor claim is set; say where bundles come from" }}{{ end }}
{{- if and .Values.registry.url (not .Values.registry.trust) (not .Values.registry.allowUnsigned) }}{{ fail "registry.trust is empty; give the trusted keys, or set registry.allowUnsigned" }}{{ end }}
{{- if not (or .Values.server.apiKeysSecret .Values.server.allowAnonymous) }}{{ fail "server.apiKeysSecret is empty; name a secret with keys.toml, or set server.allowAnonymous" }}{{ end }}
{{- range .Values.bundles }}
{{- if and $.Values.registry.url (not .model) }}{{ fail (printf "bundle %s has a path, but bundles come from a registry; give model and sku" .name) }}{{ end }}
{{- if and $.Values.claim (not .path) }}{{ fail (printf "bundle %s has no path, and bundles come from the claim %s" .name $.Values.claim) }}{{ end }}
{{- end }}
{{- end -}}

{{- define "kiln.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: ["ALL"] }
{{- end -}}
